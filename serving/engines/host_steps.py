"""Processing on the CPU before and after the model, for single images and for batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...model.bundle.manifest import Manifest, Preprocessing
from ...model.bundle.spec import MAX_PIXELS, ShapeBucket
from ...model.image_decoding import ImageHeader, decode_image, decoding_memory, is_jpeg, read_header
from ...model.image_limits import ImageError, check_size
from ...model.resizing import Pixels, pixel_dtype, resize_image, resized_size, smallest_bucket
from ..backends.base import Backend, HostOutputs
from ..detections import DetectionOptions, Detections, ResponseEncoder, TimedResponse, Timing
from .base import (
    MODEL_STEP,
    BatchEntry,
    EngineInfo,
    EngineItem,
    EngineResult,
    ImageRequest,
    ModelInput,
    Outcome,
    PlannedImage,
    SourceImage,
    Step,
)
from .postprocessing import detections_from_outputs

# Maximum size in bytes of a JPEG file whose header is read in the event loop. The headers of larger
# files are read in a thread, because reading a header searches the whole file for JPEG scans.
_QUICK_BYTES: Final = 4 << 20


def plan_image(
    source: SourceImage,
    preprocessing: Preprocessing,
    buckets: Sequence[ShapeBucket],
    *,
    max_pixels: int = MAX_PIXELS,
    apply_orientation: bool = True,
) -> PlannedImage:
    """Read an image's header. Choose the image's size after resizing, and the model's input size.

    The input size is the smallest of `buckets` that holds the resized image.

    Args:
        source: Encoded image, or pixels [H, W, 3] RGB.
        preprocessing: Target sizes and resize rule.
        buckets: Input sizes of the model.
        max_pixels: Images with more pixels are rejected.
        apply_orientation: Apply the rotation in the image's EXIF data.

    Raises:
        ImageError: invalid image.
    """
    if isinstance(source, bytes):
        header = read_header(source, max_pixels=max_pixels, apply_orientation=apply_orientation)
    else:
        height, width = source.shape[:2]
        check_size(height, width, max_pixels)
        header = ImageHeader((height, width), orientation=1, is_plain_jpeg=False)
    rule = preprocessing.resize
    size = resized_size(*header.size, preprocessing.min_size, preprocessing.max_size, rule)
    return PlannedImage(source, header, smallest_bucket(*size, buckets), size, rule)


def resized_pixels(image: PlannedImage) -> Pixels:
    """Decode an image, and resize it to the size that `plan_image` has chosen.

    Returns:
        [h, w, 3] RGB: float32 if the resize rule is `torchvision`, else uint8.

    Raises:
        ImageError: the image is damaged.
    """
    pixels = image.source
    if isinstance(pixels, (bytes, memoryview)):
        height, width = image.source_size
        is_turned = image.header.orientation != 1
        pixels = decode_image(bytes(pixels), max_pixels=height * width, apply_orientation=is_turned)
    return resize_image(pixels, *image.size, image.resize)


def write_pixels(image: PlannedImage, row: Pixels) -> None:
    """Decode an image, resize it, and write it to the top left corner of `row`.

    `image` is the output of `plan_image`, which has chosen the size after resizing. `row` is the
    part of a batch's input for this image: [3, H, W], where H and W are the model's input size. It
    must be black. Its dtype is float32 if the resize rule is `torchvision`, else uint8.

    Raises:
        ImageError: the image is damaged; `row` stays black.
    """
    height, width = image.size
    row[:, :height, :width] = resized_pixels(image).transpose(2, 0, 1)


def prepare_image(image: PlannedImage) -> ModelInput:
    """Decode and resize an image, and pad it to its input size.

    `image` is the output of `plan_image`, which has chosen the input size.

    Raises:
        ImageError: the image is damaged.
    """
    pixels = np.zeros((3, *image.bucket), pixel_dtype(image.resize))
    write_pixels(image, pixels)
    return ModelInput(pixels, image.bucket, image.size, image.source_size)


@dataclass(kw_only=True, slots=True)
class HostProcessor:
    """Pre- and postprocessor of single images in the server's process.

    An end-to-end engine decodes images and encodes responses itself. With such an engine, the
    processor only reads the image's header and returns the engine's response.
    """

    options: DetectionOptions
    encoder: ResponseEncoder
    manifest: Manifest
    engine: EngineInfo
    max_pixels: int

    def is_quick(self, source: SourceImage) -> bool:
        """Return whether `prepare` takes less time than a switch to another thread and back."""
        if not self.engine.is_end_to_end:
            return False
        # Pixels need no decoding. Headers of formats other than JPEG can be long or compressed.
        return not isinstance(source, bytes) or (len(source) <= _QUICK_BYTES and is_jpeg(source))

    def prepare_small(self, source: SourceImage, small: int) -> tuple[EngineItem | None, int]:
        """Call `prepare` if it takes at most `small` bytes of host memory.

        For an end-to-end engine, `prepare` is always called, because it reads only the header.

        Args:
            source: Encoded image, or pixels [H, W, 3] RGB.
            small: Maximum host memory of `prepare` in bytes.

        Returns:
            item: Output of `prepare`. None: `prepare` takes more memory, and was not called.
            memory: Host memory in bytes that the caller must reserve; may be 0. If `item` is None,
                the memory is for `prepare`, which the caller calls next. Otherwise, it is for the
                end-to-end engine: hold the reservation until the engine has decoded the image.

        Raises:
            ImageError: invalid image.
        """
        if self.engine.is_end_to_end:
            item = self.prepare(source)
            assert isinstance(item, ImageRequest)
            # A GPU decodes plain JPEGs in its own memory.
            on_gpu = self.engine.device == "cuda" and item.image.header.is_plain_jpeg
            return item, 0 if on_gpu else self._memory_for(source)
        memory = self._memory_for(source)
        return (None, memory) if memory > small else (self.prepare(source), 0)

    def _memory_for(self, source: SourceImage) -> int:
        """Return the peak host memory in bytes that decoding and resizing an image takes."""
        if isinstance(source, bytes):
            return decoding_memory(source, max_pixels=self.max_pixels)
        # `source` has three bytes per pixel. The peak is six: four for Pillow's copy, and two for
        # parts of the result.
        return 2 * source.nbytes

    def prepare(self, source: SourceImage) -> EngineItem:
        """Convert an image to the engine's input.

        Raises:
            ImageError: invalid image.
        """
        preprocessing, buckets = self.manifest.preprocessing, self.engine.buckets
        image = plan_image(source, preprocessing, buckets, max_pixels=self.max_pixels)
        if not self.engine.is_end_to_end:
            return prepare_image(image)
        return ImageRequest(image, self.options, self.encoder)

    def respond(self, result: EngineResult, item: EngineItem) -> TimedResponse[Any]:
        """Convert the engine's result for an image to the encoded response.

        The result of an end-to-end engine already is an encoded response, or an error.

        Args:
            result: The engine's result for the image.
            item: Output of `prepare` for the image.

        Returns:
            The encoded response with its timing. If the engine is not end-to-end, all durations
            are 0.

        Raises:
            ImageError: `result` is this error: the end-to-end engine could not decode the image.
            BundleError: the bundle has no category for a label.
        """
        if isinstance(result, ImageError):
            raise result
        if isinstance(result, TimedResponse):
            return result
        assert not isinstance(item, ImageRequest)
        found = detections_from_outputs(result, 0, item, self.manifest, self.options)
        return TimedResponse(self.encoder(found), Timing())


class _PreparedBatch(NamedTuple):
    entries: Sequence[BatchEntry]
    bucket: ShapeBucket
    # [B, 3, H, W].
    images: Pixels
    # [B, 2] height and width before padding.
    image_sizes: NDArray[np.int64]


class _InferredBatch(NamedTuple):
    entries: Sequence[BatchEntry]
    outputs: HostOutputs


class HostSteps:
    """Processing steps for any backend. Images are decoded and masks are encoded on the CPU."""

    def __init__(self, backend: Backend, manifest: Manifest, *, threads: int) -> None:
        """Create the processing steps of a batch: decoding, model and encoding.

        Args:
            backend: Backend that runs the model.
            manifest: Manifest of the backend's bundle.
            threads: Maximum number of batches whose images are decoded concurrently. The same limit
                applies separately to batches whose masks are encoded.
        """
        self._backend = backend
        self._manifest = manifest
        self.concurrency: Final = 2 * threads + backend.concurrency
        self.steps = (
            Step("decode", self._prepare, threads),
            Step(MODEL_STEP, self._infer, backend.concurrency),
            Step("encode", self._encode, threads),
        )

    def detect(self, request: ImageRequest) -> Detections:
        """Detect objects in one image. All steps run in the calling thread.

        Raises:
            ImageError: the image is damaged.
            BundleError: the bundle has no category for a label.
        """
        (outcome,) = self._encode(self._infer(self._prepare([request])))
        if isinstance(outcome, ImageError):
            raise outcome
        return outcome

    def synchronize(self) -> None:
        """Do nothing: each processing step has finished all its work when it returns."""

    def _prepare(self, requests: Sequence[ImageRequest]) -> _PreparedBatch:
        bucket = requests[0].bucket
        dtype = pixel_dtype(self._manifest.preprocessing.resize)
        images = np.zeros((len(requests), 3, *bucket), dtype)
        entries: list[BatchEntry] = []
        for row, request in zip(images, requests, strict=True):
            try:
                write_pixels(request.image, row)
            except ImageError as error:
                entries.append(error)
            else:
                entries.append(request)
        sizes = np.array([request.image.size for request in requests], np.int64)
        return _PreparedBatch(entries, bucket, images, sizes)

    def _infer(self, batch: _PreparedBatch) -> _InferredBatch:
        outputs = self._backend.infer(batch.bucket, batch.images, batch.image_sizes)
        return _InferredBatch(batch.entries, outputs)

    def _encode(self, batch: _InferredBatch) -> list[Outcome]:
        return [
            entry
            if isinstance(entry, ImageError)
            else detections_from_outputs(
                batch.outputs, row, entry.image, self._manifest, entry.options
            )
            for row, entry in enumerate(batch.entries)
        ]
