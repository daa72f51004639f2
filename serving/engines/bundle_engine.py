"""Engines that compute batches with a bundle's model."""

import dataclasses
import time
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from ...model.bundle.manifest import Manifest, Precision
from ...model.bundle.spec import ShapeBucket
from ...model.image_decoding import read_header
from ...model.image_limits import ImageError
from ...model.resizing import Pixels
from ..backends.base import Backend, DeviceBackend, HostOutputs, ModelOutputs
from ..backends.loading import describe_model, load_backend
from ..config import BackendName
from ..detections import DEFAULT_OPTIONS, Detections, TimedResponse
from ..messages import encode_detections
from .base import (
    BatchSteps,
    Engine,
    EngineInfo,
    ImageRequest,
    ModelInput,
    PlannedImage,
    StepChain,
)


@dataclasses.dataclass(frozen=True)
class BundleLoader:
    """Picklable loader of an engine for a bundle (exported model).

    The fields are the arguments of `load_backend`.
    """

    bundle: Path
    manifest: Manifest
    precision: Precision
    backend: BackendName
    max_batch: int

    def __str__(self) -> str:
        return describe_model(self.bundle, self.manifest, self.precision)

    def load(self) -> Engine[Any, Any]:
        """Load the backend, and return an engine that uses it.

        Raises:
            BundleError: the bundle is damaged, or has no model file for `precision` and `backend`.
            BackendError: the backend cannot run on this machine, or cannot compute batches of
                `max_batch` images.
        """
        backend = load_backend(
            self.bundle, self.manifest, self.precision, self.backend, self.max_batch
        )
        if not isinstance(backend, DeviceBackend):
            return HostEngine(backend)
        # Lazy import: torch is possibly not installed for the other backends.
        from .device_steps import DeviceSteps

        return DeviceEngine(backend, DeviceSteps(backend, self.manifest))


class HostEngine:
    """Engine for any backend. It takes resized and padded images and returns model outputs."""

    def __init__(self, backend: Backend) -> None:
        """Take ownership of a backend. Closing the engine closes the backend."""
        self._backend = backend
        self.info = EngineInfo(
            backend=backend.name,
            device=backend.device,
            concurrency=backend.concurrency,
            saturating_batches=backend.concurrency,
            buckets=backend.buckets,
            is_end_to_end=False,
        )
        self.warm_up = backend.warm_up
        self.close = backend.close

    def compute(self, items: Sequence[ModelInput]) -> list[HostOutputs]:
        """Return the model's outputs for each image. Each array keeps a batch dimension of 1."""
        pixels: Pixels = np.stack([item.pixels for item in items])
        sizes = np.array([item.size for item in items], np.int64)
        outputs = self._backend.infer(items[0].bucket, pixels, sizes)
        return [
            ModelOutputs._make(output[row : row + 1] for output in outputs)
            for row in range(len(items))
        ]


class DeviceEngine:
    """End-to-end engine of a `DeviceBackend`.

    It takes source images and returns encoded responses. All processing steps of a batch run
    in the thread that calls `compute`.
    """

    # One batch before the model, one in the model and one after it keep the model busy. While three
    # or more batches are in flight, only full ones start. A smaller batch would have to wait for
    # the model anyway, and until then more images can be added to it.
    saturating_batches: Final = 3

    def __init__(self, backend: Backend, steps: BatchSteps) -> None:
        """Create an engine.

        Args:
            backend: Loaded backend. Closing the engine closes it.
            steps: Processing steps of a batch, from image files to detections or responses. The
                step that runs the model must use `backend`.
        """
        self._backend = backend
        self._compute = StepChain(steps)
        self.info = EngineInfo(
            backend=backend.name,
            device=backend.device,
            concurrency=steps.concurrency,
            saturating_batches=self.saturating_batches,
            buckets=backend.buckets,
            is_end_to_end=True,
        )
        self.close = backend.close

    def warm_up(self, max_batch: int) -> None:
        """Warm up the backend, all processing steps, and the encoder of DetectResponse messages.

        On a GPU, the batches have up to `max_batch` images. On the CPU, they have one image.
        """
        self._backend.warm_up(max_batch)
        batch = 1 if self._backend.device == "cpu" else max_batch
        for bucket in self._backend.buckets:
            request = ImageRequest(_black_image(bucket), DEFAULT_OPTIONS, encode_detections)
            self.compute([request] * batch)

    def compute(self, items: Sequence[ImageRequest]) -> list[TimedResponse[Any] | ImageError]:
        """Return one result per request: the encoded response, or the error of an invalid image."""
        return [
            _encoded(item, outcome) if isinstance(outcome, Detections) else outcome
            for item, outcome in zip(items, self._compute(items), strict=True)
        ]


def _encoded(item: ImageRequest, detections: Detections) -> TimedResponse[Any]:
    start = time.perf_counter()
    value = item.encoder(detections)
    encode_us = detections.timing.encode_us + round(1e6 * (time.perf_counter() - start))
    return TimedResponse(value, dataclasses.replace(detections.timing, encode_us=encode_us))


def _black_image(bucket: ShapeBucket) -> PlannedImage:
    """Return a black JPEG image of the model's input size `bucket`."""
    file = BytesIO()
    Image.new("RGB", (bucket.width, bucket.height)).save(file, "JPEG")
    data = file.getvalue()
    return PlannedImage(data, read_header(data), bucket, bucket)
