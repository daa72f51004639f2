"""Types of the batches between GPU steps, with CUDA events that order and time the steps."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray
from torch import Tensor

from ...model.bundle.spec import ShapeBucket
from ...model.image_limits import ImageError
from ..backends.base import ModelOutputs
from ..detections import MaskFormat, Timing
from .base import BatchEntry, ImageRequest
from .device_masks import MaskBatch
from .device_transfers import StreamEvent


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
