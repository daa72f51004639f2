"""What the server does with one request: decode, queue, infer, encode."""

import asyncio
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor

from ..model.manifest import Manifest
from .backends.base import Backend
from .batching import Batcher
from .config import ServeConfig
from .detections import DetectionOptions, Detections, Timing
from .errors import QueueFullError
from .postprocessing import detections_from_outputs
from .preprocessing import prepare_image


class Pipeline:
    """Takes many requests at once; `run` must be running for them to be answered."""

    def __init__(self, manifest: Manifest, backend: Backend, config: ServeConfig) -> None:
        self.manifest = manifest
        self.buckets = backend.buckets
        self._config = config
        self._batcher = Batcher(backend, config.max_batch, config.max_delay_ms / 1000)
        self._threads = ThreadPoolExecutor(config.threads, thread_name_prefix="images")
        self._in_progress = 0

    async def warm_up(self) -> None:
        """Make the backend ready; requests that arrive meanwhile wait."""
        await self._batcher.warm_up()

    async def run(self) -> None:
        """Compute what `detect` is asked for, until cancelled."""
        await self._batcher.run()

    def close(self) -> None:
        """Release threads and model."""
        self._threads.shutdown()
        self._batcher.close()

    async def detect(self, data: bytes, options: DetectionOptions) -> Detections:
        """Detect in an encoded image.

        Raises:
            ImageError: the image cannot be used.
            QueueFullError: too many requests are in progress.
        """
        if self._in_progress >= self._config.queue_size:
            raise QueueFullError(
                f"the server has {self._in_progress} requests in progress, as many as it takes; "
                "try again later"
            )
        self._in_progress += 1
        try:
            return await self._detect(data, options)
        finally:
            self._in_progress -= 1

    async def _detect(self, data: bytes, options: DetectionOptions) -> Detections:
        loop = asyncio.get_running_loop()
        start = time.monotonic()
        preprocessing, max_pixels = self.manifest.preprocessing, self._config.max_pixels
        image = await loop.run_in_executor(
            self._threads, prepare_image, data, preprocessing, self.buckets, max_pixels
        )
        decode_s = time.monotonic() - start
        result = await self._batcher.infer(image)
        start = time.monotonic()
        detections = await loop.run_in_executor(
            self._threads,
            detections_from_outputs,
            result.outputs,
            result.row,
            image,
            self.manifest,
            options,
        )
        timing = Timing(
            decode_us=_microseconds(decode_s),
            queue_us=_microseconds(result.queue_s),
            infer_us=_microseconds(result.infer_s),
            encode_us=_microseconds(time.monotonic() - start),
            batch_size=result.batch_size,
        )
        return dataclasses.replace(detections, timing=timing)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
