"""Interfaces of engines and of processing steps, with their input and output types."""

from collections.abc import Callable, Sequence
from threading import BoundedSemaphore
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...model.bundle.spec import ResizeRule, ShapeBucket
from ...model.image_decoding import ImageHeader
from ...model.image_limits import ImageError
from ...model.resizing import Pixels
from ..backends.base import HostOutputs
from ..detections import (
    DetectionOptions,
    Detections,
    ResponseEncoder,
    TimedResponse,
    not_encoded,
    out_of_band,
)

# Outcome of processing one image: its detections, or the error if the image is invalid.
Outcome = Detections | ImageError

# Alignment in bytes of arrays that lie in one block of memory: a cache line.
_ALIGNMENT: Final = 64

# An encoded image, or pixels [H, W, 3] RGB.
SourceImage = bytes | NDArray[np.uint8]


class ModelInput(NamedTuple):
    """Resized and padded image, ready to become part of a batch."""

    # [3, H, W] RGB, padded to the size `bucket`. float32 if the resize rule is `torchvision`, else
    # uint8.
    pixels: Pixels
    # Input size of the model.
    bucket: ShapeBucket
    # Height and width in pixels before padding.
    size: tuple[int, int]
    # Height and width of the source image in pixels.
    source_size: tuple[int, int]


class PlannedImage(NamedTuple):
    """Source image with preprocessing parameters that were computed from the image's header."""

    # In a worker process, an encoded image is a view of memory shared with the server's process.
    source: SourceImage | memoryview
    header: ImageHeader
    # Input size of the model, to which the image is padded.
    bucket: ShapeBucket
    # Height and width in pixels after resizing, before padding.
    size: tuple[int, int]
    resize: ResizeRule = "pillow"

    @property
    def source_size(self) -> tuple[int, int]:
        """Height and width of the source image in pixels."""
        return self.header.size

    def __reduce_ex__(self, protocol: Any) -> tuple[type, tuple[Any, ...]]:
        """Make pickle pass an encoded image as an out-of-band buffer, without a copy."""
        return PlannedImage, (out_of_band(self.source, protocol), *self[1:])


class ImageRequest(NamedTuple):
    """Image to detect objects in, with its detection options."""

    image: PlannedImage
    options: DetectionOptions
    # Encoder of the response, for engines that encode responses themselves.
    encoder: ResponseEncoder = not_encoded

    @property
    def bucket(self) -> ShapeBucket:
        """Input size to which the image is padded."""
        return self.image.bucket


# Entry of a batch: the request for an image, or the error if the image is invalid. The model's
# input for an invalid image is black.
BatchEntry = ImageRequest | ImageError

# Name of the step that runs the model.
MODEL_STEP = "model"


class Step(NamedTuple):
    """Processing step of a batch: a function, and the maximum number of concurrent batches."""

    name: str
    # Takes the result of the previous step. The first step takes `ImageRequest`s of one input size,
    # and the last step returns the result of each request.
    run: Callable[[Any], Any]
    # Maximum number of batches in this step at once. 1 keeps batches in order. Not used if
    # `continues_section` is True.
    threads: int
    # Whether the step shares the limit of the previous step. Both then belong to one section; see
    # `StepChain`.
    continues_section: bool = False


class BatchSteps(Protocol):
    """Interface of the processing steps that turn a batch of images into detections."""

    @property
    def steps(self) -> tuple[Step, ...]:
        """Processing steps in the order in which a batch passes them."""

    @property
    def concurrency(self) -> int:
        """Number of in-flight batches that suffices to keep the model busy."""

    def synchronize(self) -> None:
        """Wait for the GPU work that the processing steps have queued."""


class StepChain:
    """Callable that runs all processing steps of a batch in the calling thread. Thread-safe.

    A section is a group of successive steps with a common limit on concurrent batches. If the limit
    is reached, further batches wait. A `Step` whose `continues_section` is False begins a new
    section, and its field `threads` is the limit of the section.
    """

    # One thread per batch, not one per step: fewer threads then compete for the GIL.

    def __init__(self, steps: BatchSteps) -> None:
        self._synchronize = steps.synchronize
        self._sections: list[tuple[list[Callable[[Any], Any]], BoundedSemaphore]] = []
        for step in steps.steps:
            if not step.continues_section:
                self._sections.append(([], BoundedSemaphore(step.threads)))
            self._sections[-1][0].append(step.run)

    def __call__(self, requests: Sequence[ImageRequest]) -> list[Any]:
        """Run all processing steps on a batch. Return the last step's list of results.

        All images of the batch have the same input size. There is one result per image. A result is
        a `TimedResponse` if the steps have encoded the response to the image's request. Otherwise
        it is the image's `Outcome`: `Detections`, or an `ImageError` if the image is invalid.
        """
        batch: Any = requests
        for runs, free in self._sections:
            with free:
                for run in runs:
                    try:
                        batch = run(batch)
                    except BaseException:
                        self._synchronize()  # queued work uses the batch's memory
                        raise
        results: list[Any] = batch
        return results


def aligned_layout(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Return the offsets at which arrays are stored in one block of memory, and the block's size.

    `lengths` are the sizes of the arrays. All values are in bytes. The offsets are multiples of 64.
    """
    starts, end = [], 0
    for length in lengths:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + length
    return starts, end


# Input of an engine for one image (`EngineItem`), and its output (`EngineResult`).
EngineItem = ModelInput | ImageRequest
EngineResult = HostOutputs | TimedResponse[Any] | ImageError

Item = TypeVar("Item", contravariant=True)
Result = TypeVar("Result", covariant=True)


class EngineInfo(NamedTuple):
    """Properties of a loaded engine."""

    # Value of --backend that selects this backend.
    backend: str
    device: Literal["cpu", "cuda"]
    # Number of batches that the engine can have in flight at once, each in a thread of its own.
    concurrency: int
    # Number of in-flight batches that keep the engine busy. While at least this many are in flight,
    # only full batches start.
    saturating_batches: int
    # Input sizes of the model.
    buckets: tuple[ShapeBucket, ...]
    # True: the engine takes `ImageRequest`s and returns encoded responses. False: it takes
    # `ModelInput`s, prepared on the CPU, and returns the model's outputs for each image.
    is_end_to_end: bool


class Engine(Protocol[Item, Result]):
    """Loaded model that computes batches. An item is the engine's input for one image.

    Items and results are picklable.
    """

    @property
    def info(self) -> EngineInfo:
        """Properties of the engine."""

    def warm_up(self, max_batch: int) -> None:
        """Compute test batches of up to `max_batch` images, for each input size of the model.

        The first requests then need not wait for compilation or memory allocation.
        """

    def compute(self, items: Sequence[Item]) -> Sequence[Result]:
        """Compute a batch of items with the same input size. Return one result per item.

        Arrays in the items are valid only during the call.
        """

    def close(self) -> None:
        """Release the engine's resources. The engine cannot be used afterwards."""


class EngineLoader(Protocol[Item, Result]):
    """Picklable object that loads an engine in a worker process.

    `str(loader)` describes the model in log messages.
    """

    def load(self) -> Engine[Item, Result]:
        """Load the engine.

        Raises:
            BundleError: the bundle (exported model) is damaged, or has no model file for the
                loader's precision and backend.
            BackendError: the backend cannot run on this machine, or cannot compute batches of
                the loader's maximum size.
        """
