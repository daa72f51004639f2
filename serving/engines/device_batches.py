"""Batches between GPU steps: their types, CUDA events, copies, and decoding on CPU or GPU."""

import functools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...model.bundle.spec import ShapeBucket
from ...model.device_images import apply_orientation
from ...model.image_limits import ImageError
from ..backends.base import ModelOutputs
from ..detections import MaskFormat, Timing
from .base import BatchEntry, ImageRequest, PlannedImage
from .device_masks import MaskBatch
from .host_steps import resized_pixels

_log = logging.getLogger(__name__)

# First pause between polls of an event, and the default of the longest one, in seconds.
FIRST_PAUSE_S: Final = 1e-4
LONGEST_PAUSE_S: Final = 5e-4

# Largest image in pixels that the device decodes. A batch of larger ones would need gigabytes of
# GPU memory.
_MAX_DEVICE_PIXELS: Final = 1 << 24


class StreamEvent:
    """CUDA event with timing. On the CPU, where work is synchronous, it is complete on creation."""

    def __init__(self, device: torch.device) -> None:
        """Record an event in the device's current stream."""
        self._time = time.perf_counter()
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self, longest_pause_s: float = LONGEST_PAUSE_S) -> None:
        """Poll the event until it is complete, with pauses of at most `longest_pause_s`."""
        # CUDA's own waits are worse: one occupies a core, and the other takes 10 ms on some virtual
        # machines. The pauses grow, because each poll takes the GIL and CPU time. Bulk prediction
        # limits them, because it is faster with short ones.
        pause_s = FIRST_PAUSE_S
        while self._event is not None and not self._event.query():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_pause_s)

    def block(self, stream: Any) -> None:
        """Make the CUDA stream `stream` wait for the event. On the CPU, do nothing."""
        if self._event is not None:
            stream.wait_event(self._event)

    def seconds_since(self, earlier: "StreamEvent") -> float:
        """Return the seconds from an earlier event to this one. Both must be complete."""
        if self._event is None:
            return self._time - earlier._time
        return float(earlier._event.elapsed_time(self._event)) / 1000


class ReadBatch(NamedTuple):
    """Batch after reading: encoded files for the device, images that the CPU already decoded."""

    requests: Sequence[ImageRequest]
    # Contents of the files that the device decodes, each [bytes] uint8.
    files: Sequence[Tensor]
    # For each request, [3, h, w] decoded and resized on the CPU. None: the device decodes it.
    from_host: Sequence[Tensor | ImageError | None]


class DecodedBatch(NamedTuple):
    """Batch after decoding: images that are already rotated according to their EXIF data."""

    requests: Sequence[ImageRequest]
    # For each request, the image [3, h, w] after its EXIF rotation: uint8 in source size on the
    # device, or already resized on the host.
    pixels: Sequence[Tensor | ImageError]
    # Events before and after decoding.
    begin: StreamEvent
    ready: StreamEvent


class PreparedBatch(NamedTuple):
    """Batch after padding: the model's input."""

    bucket: ShapeBucket
    entries: Sequence[BatchEntry]
    # [B, 3, H, W] uint8, or float32 with the resize rule `torchvision`.
    images: Tensor
    # [B, 2] int64, height and width before padding.
    sizes: Tensor
    # [B, 2] int64, height and width of the source images.
    source_sizes: Tensor
    # [B, 1, 4] float32 each: factors that scale boxes to the source images, and limits that clip
    # the scaled boxes.
    scales: Tensor
    limits: Tensor
    # Event before decoding.
    begin: StreamEvent
    # The tensors are valid after this event.
    ready: StreamEvent


class InferredBatch(NamedTuple):
    """Batch after inference: the model's outputs."""

    prepared: PreparedBatch
    outputs: ModelOutputs[Tensor]
    # Events before and after the model. The model starts when that of the previous batch ends.
    begin: StreamEvent
    ready: StreamEvent


class PastedBatch(NamedTuple):
    """Batch after mask encoding: detections and encoded masks, copied to the host."""

    inferred: InferredBatch
    masks: MaskBatch
    # Host arrays as in `ModelOutputs`, without masks; boxes in pixels of the source images.
    detections: Sequence[NDArray[Any]]
    # Host arrays by mask format. RLE: the fields of `EncodedMasks`. PROBABILITIES: the masks.
    encoded: Mapping[MaskFormat, Sequence[NDArray[Any]]]
    # The arrays on the host are valid after this event.
    ready: StreamEvent


def timing_of(batch: PastedBatch, host_s: float) -> Timing:
    """Return the timing of a batch.

    `host_s` is the duration in seconds of the CPU work that follows the GPU work.
    """
    inferred = batch.inferred
    prepared = inferred.prepared
    return Timing(
        decode_us=round(1e6 * prepared.ready.seconds_since(prepared.begin)),
        queue_us=round(1e6 * inferred.begin.seconds_since(prepared.ready)),
        infer_us=round(1e6 * inferred.ready.seconds_since(inferred.begin)),
        encode_us=round(1e6 * (batch.ready.seconds_since(inferred.ready) + host_s)),
        batch_size=len(prepared.entries),
    )


def copy_to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return an array as a tensor on `device`. On a GPU, the current stream fills it later.

    The stream copies from a pinned copy, so the array may be changed after this call.
    """
    host = torch.from_numpy(array)
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def copy_to_host(tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Queue copies of tensors to host memory in the current stream. Return the host arrays.

    The arrays are valid once the stream has run the copies.
    """
    hosts = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in tensors]
    for host, tensor in zip(hosts, tensors, strict=True):
        host.copy_(tensor, non_blocking=True)
    return [host.numpy() for host in hosts]


def file_for_device(image: PlannedImage) -> bytes | memoryview | None:
    """Return the encoded image for the device to decode. None: the device cannot decode it."""
    suits = image.header.is_plain_jpeg and math.prod(image.source_size) <= _MAX_DEVICE_PIXELS
    return image.source if suits and isinstance(image.source, (bytes, memoryview)) else None


def pixels_from_host(image: PlannedImage) -> Tensor | ImageError:
    """Decode and resize an image on the CPU.

    Returns:
        [3, h, w] on the CPU, where h and w are the resized size. float32 if the resize rule is
        `torchvision`, else uint8. If the image is invalid, the error.
    """
    try:
        pixels = resized_pixels(image)
    except ImageError as error:
        return error
    # Pixels that need no resizing can lie in read-only memory, which torch does not accept.
    return torch.from_numpy(np.require(pixels, requirements="W")).permute(2, 0, 1)


def upright_pixels(image: PlannedImage, decoded: Tensor | ImageError) -> Tensor | ImageError:
    """Apply the EXIF orientation to an image that the device decoded.

    Args:
        image: Encoded image and its EXIF orientation.
        decoded: [3, h, w] uint8 on the device, or the error of the device's decoder.

    Returns:
        The rotated image on the device: [3, h, w] uint8 in source size. If the device's decoder
        failed, the output of `pixels_from_host`: the resized image on the CPU, or an error.
    """
    if isinstance(decoded, ImageError):
        _warn_once(str(decoded))
        return pixels_from_host(image)
    return apply_orientation(decoded, image.header.orientation)


@functools.lru_cache(maxsize=16)
def _warn_once(reason: str) -> None:
    """Log a warning with the device decoder's error. Cached, so that repeated errors log once."""
    _log.warning("decoding the image on the CPU; the GPU decoder cannot: %s", reason)
