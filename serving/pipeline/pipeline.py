"""Processing of an inference request: admission, decoding, queueing, inference, encoding."""

import contextlib
import time
from dataclasses import dataclass
from typing import Any

from ..config import ServeConfig
from ..detections import DetectionOptions, ResponseEncoder, SchedulingOptions, TimedResponse, Timing
from ..engines.base import EngineItem, EngineResult, SourceImage
from ..engines.host_steps import HostProcessor
from .admission import AdmissionController
from .batching import BatchResult
from .scheduling import TimedResult, timed
from .served_model import ModelBatcher, ModelLifecycle, ModelSource, ServedModel
from .shared_resources import SharedResources

# Minimum number of admission slots, however slow the model is: two batches, so that one can fill
# while the other is computed, and at least 32, which suffice for the usual Triton clients.
_MIN_BATCHES, _MIN_SLOTS = 2, 32


@dataclass(frozen=True, kw_only=True)
class InferenceRequest:
    """Request to detect objects in one image."""

    source: SourceImage
    options: DetectionOptions
    scheduling: SchedulingOptions
    encoder: ResponseEncoder


class Pipeline:
    """Processor of a model's inference requests. Use it within `self.lifecycle.running()`."""

    def __init__(
        self, source: ModelSource, config: ServeConfig, resources: SharedResources
    ) -> None:
        """Create a pipeline. The caller loads its model with `ServedModel.load`.

        Args:
            source: Bundle and name of the model.
            config: Settings of the server.
            resources: Threads, memory and limits that all models share.

        Raises:
            BundleError: the bundle is missing.
        """
        self.telemetry = resources.telemetry
        self.lifecycle = ModelLifecycle(source, config, self.telemetry.metrics)
        self._config = config
        self.admission = AdmissionController(
            config.queue_size,
            config.max_wait_s,
            min_capacity=max(_MIN_SLOTS, _MIN_BATCHES * config.max_batch),
        )
        self.rate_limits = resources.rate_limits
        self.threads = resources.threads
        self.decode_memory = resources.decode_memory

    @property
    def model(self) -> ServedModel:
        """Served model, which processes new requests."""
        return self.lifecycle.model

    @property
    def stream_window(self) -> int:
        """Maximum number of in-flight images per stream.

        If all workers of the model together can have N batches in flight, the images of a stream
        can fill N + 1 batches.
        """
        return (self.model.batcher().concurrency + 1) * self._config.max_batch

    async def detect(self, request: InferenceRequest, model: ServedModel) -> TimedResponse[Any]:
        """Detect objects in an image and return the encoded response.

        If the calling task is cancelled, the image leaves the queue immediately.

        Args:
            request: The request. Its `scheduling.timeout_s` is not applied here; the caller uses
                `request_deadline`.
            model: Model to use. The caller is within the model's `use` context.

        Raises:
            ImageError: invalid image.
            InvalidRequestError: the requested precision is not served.
            BackendDownError: no worker is up, or the worker process ended during the image's batch.
            BackendError: the engine failed on the image's batch.
        """
        source, scheduling = request.source, request.scheduling
        name, precision = model.manifest.model_name, scheduling.precision or model.precisions[0]
        with self.telemetry.image(name, precision) as record_timing:
            batcher = model.batcher(scheduling.precision)
            host = HostProcessor(
                options=request.options,
                encoder=request.encoder,
                manifest=model.manifest,
                engine=batcher.info,
                max_pixels=self._config.max_pixels,
            )
            del request
            async with contextlib.AsyncExitStack() as memory:
                preparing = self._prepare(host, source, scheduling.peer, memory)
                # The encoded image can be large. Without this reference, it can be freed while the
                # request waits for a batch.
                del source
                decoded = await preparing
                if not batcher.info.is_end_to_end:
                    await memory.aclose()
                result = await batcher.infer(decoded.value, scheduling)
            if batcher.info.is_end_to_end:  # the engine encoded the response already
                encoded = timed(host.respond, result.value, decoded.value)
            else:
                encoded = await self.threads.run(
                    scheduling.peer, host.respond, result.value, decoded.value
                )
            self._observe(decoded, result, encoded, batcher)
            timing = _total_timing(decoded, result, encoded)
            record_timing(timing)
            return TimedResponse(encoded.value.value, timing)

    async def _prepare(
        self,
        host: HostProcessor,
        source: SourceImage,
        peer: str,
        memory: contextlib.AsyncExitStack,
    ) -> TimedResult[EngineItem]:
        """Convert an image to the engine's input.

        If decoding needs a reservation of host memory, the reservation lasts until the caller
        closes `memory`.
        """
        small = self.decode_memory.small
        if host.is_quick(source):
            first = timed(host.prepare_small, source, small)
        else:
            first = await self.threads.run(peer, host.prepare_small, source, small)
        item, needed = first.value
        elapsed_s, waited_s = first.elapsed_s, first.waited_s
        if needed:
            start = time.perf_counter()
            await memory.enter_async_context(self.decode_memory.reserve(peer, needed))
            waited_s += time.perf_counter() - start
        if item is None:
            preparing = self.threads.run(peer, host.prepare, source)
            del source
            item, own_s, own_wait_s = await preparing
            elapsed_s, waited_s = elapsed_s + own_s, waited_s + own_wait_s
        return TimedResult(item, elapsed_s, waited_s)

    def _observe(
        self,
        decoded: TimedResult[Any],
        result: BatchResult[EngineResult],
        encoded: TimedResult[TimedResponse[Any]],
        batcher: ModelBatcher,
    ) -> None:
        """Report the image's service time to admission control.

        The service time is the longer of two times. The first is the batch's duration, divided by
        the batch size and by the number of batches that the workers can have in flight. The second
        is the image's decode and encode time, divided by the size of the thread pool.
        """
        infer_s = result.infer_s / result.batch_size / batcher.concurrency
        host_s = (decoded.elapsed_s + encoded.elapsed_s) / self.threads.size
        self.admission.observe_service_time(max(infer_s, host_s))


def _total_timing(
    decoded: TimedResult[Any],
    result: BatchResult[EngineResult],
    encoded: TimedResult[TimedResponse[Any]],
) -> Timing:
    engine = encoded.value.timing
    return Timing(
        decode_us=_microseconds(decoded.elapsed_s) + engine.decode_us,
        queue_us=_microseconds(decoded.waited_s + result.queue_s + encoded.waited_s)
        + engine.queue_us,
        infer_us=engine.infer_us or _microseconds(result.infer_s),
        encode_us=_microseconds(encoded.elapsed_s) + engine.encode_us,
        batch_size=result.batch_size,
    )


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
