"""Boxes scaled to the source images, and masks encoded as COCO RLE, on the GPU."""

from collections.abc import Sequence
from itertools import islice
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...model.masks import MaskPaste
from ...plugins.compress_runs import compress_runs
from ...plugins.paste_rle import paste_rle

# Maximum number of runs to encode at once if masks exceed their buffers: 64 MiB on the device, and
# half as much RLE text.
_REPEATED_RUNS: Final = 1 << 24
# RLE characters per run that suffice for most masks. If they do not, the masks are compressed
# again.
_USUAL_CHARACTERS_PER_RUN: Final = 2


def scales_and_limits(
    sizes: NDArray[np.int64], source_sizes: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the factors and the clip limits with which boxes are scaled to the source images.

    Args:
        sizes: [B, 2], height and width of the resized images.
        source_sizes: [B, 2], height and width of the source images.

    Returns:
        [2, B, 1, 4] float32. Element [0]: factor for each coordinate of an xyxy box. Element [1]:
        upper limit of each coordinate in pixels of the source image.
    """
    # In NumPy, because torch would launch ten kernels on the GPU.
    corners, limits = (
        pairs[:, None, [1, 0, 1, 0]].astype(np.float32) for pairs in (sizes, source_sizes)
    )
    return np.stack([limits / corners, limits])


def boxes_in_sources(boxes: Tensor, scales: Tensor, limits: Tensor) -> Tensor:
    """Scale boxes to the source images and clip them, as `detections_from_outputs` does.

    Args:
        boxes: [B, D, 4] float32 xyxy in pixels of the resized images.
        scales: [B, 1, 4] float32 from `scales_and_limits`.
        limits: [B, 1, 4] float32 from `scales_and_limits`.

    Returns:
        [B, D, 4] in pixels of the source images.
    """
    return torch.minimum((boxes * scales).clamp_(min=0), limits)


class MaskBatch(NamedTuple):
    """Masks of a batch of B images with D detections each, before pasting."""

    # [B, D, M, M] float32.
    probabilities: Tensor
    # [B, D, 4] float32 xyxy in pixels of the source images.
    boxes: Tensor
    # [B, 2] int64, height and width of the source images.
    source_sizes: Tensor
    paste: MaskPaste


Array = TypeVar("Array", Tensor, NDArray[Any])


class EncodedMasks(NamedTuple, Generic[Array]):
    """COCO RLE `counts` of a batch's masks: tensors on a device, or arrays on the host."""

    # [B, D, capacity] uint8: the characters of each mask, then undefined bytes.
    text: Array
    # [B, D] int32: characters of each mask. If more than `capacity`, its text is truncated.
    lengths: Array
    # [B, D] int32: runs of each mask. If more than the run capacity, its text is invalid.
    num_runs: Array


def encode_masks(masks: MaskBatch, run_capacity: int, capacity: int) -> EncodedMasks[Tensor]:
    """Paste masks into their source images and encode them as COCO RLE.

    Args:
        masks: Masks on any device.
        run_capacity: Buffer size in RLE runs per mask.
        capacity: Buffer size in RLE characters per mask.

    Returns:
        The encoded masks. The RLE of a mask that exceeds a buffer is invalid here; `selected_rles`
        encodes this mask again.
    """
    images, depth = masks.boxes.shape[:2]
    runs, num_runs = paste_rle(
        masks.probabilities.flatten(0, 1),
        masks.boxes.flatten(0, 1),
        masks.source_sizes.repeat_interleave(depth, dim=0, output_size=images * depth),
        run_capacity,
        paste=masks.paste,
    )
    text, lengths = compress_runs(runs, num_runs, capacity)
    return EncodedMasks(
        text.view(images, depth, capacity),
        lengths.view(images, depth),
        num_runs.view(images, depth),
    )


def selected_rles(
    masks: MaskBatch,
    encoded: EncodedMasks[NDArray[Any]],
    run_capacity: int,
    rows: Sequence[NDArray[np.intp]],
) -> list[list[bytes]]:
    """Return the COCO RLE `counts` of selected masks, for each image of a batch.

    Masks that did not fit the buffers of `encode_masks` are encoded again in larger buffers.

    Args:
        masks: Masks of the batch, on a device.
        encoded: Output of `encode_masks` for `masks`, copied to the host.
        run_capacity: The `run_capacity` given to `encode_masks`.
        rows: For each image, [N] indices of its selected masks.
    """
    chosen = np.concatenate([row + image * masks.boxes.shape[1] for image, row in enumerate(rows)])
    lengths, num_runs = (array.reshape(-1)[chosen] for array in encoded[1:])
    capacity = encoded.text.shape[-1]
    text = encoded.text.reshape(-1).data
    starts = (capacity * chosen).tolist()
    counts = [
        bytes(text[start : start + length])
        for start, length in zip(starts, lengths.tolist(), strict=True)
    ]
    exceeding = np.flatnonzero((num_runs > run_capacity) | (lengths > capacity))
    # In parts, because a few noisy masks can have a hundred times as many runs as others.
    size = max(1, _REPEATED_RUNS // max(1, num_runs[exceeding].max(initial=0)))
    for part in np.split(exceeding, range(size, len(exceeding), size)) if len(exceeding) else ():
        repeated = _encode_exactly(masks, chosen[part], int(num_runs[part].max()))
        for index, own in zip(part.tolist(), repeated, strict=True):
            counts[index] = own
    remaining = iter(counts)
    return [list(islice(remaining, len(row))) for row in rows]


def _encode_exactly(masks: MaskBatch, chosen: NDArray[np.intp], run_capacity: int) -> list[bytes]:
    """Encode masks of at most `run_capacity` RLE runs each, and return their COCO `counts`.

    `chosen` are flat indices of masks in the batch: image * D + detection.
    """
    # One transfer in each direction, because a transfer waits for queued work of other batches.
    index = torch.from_numpy(chosen).to(masks.boxes.device)
    runs, num_runs = paste_rle(
        masks.probabilities.flatten(0, 1)[index],
        masks.boxes.flatten(0, 1)[index],
        masks.source_sizes[index // masks.boxes.shape[1]],
        run_capacity,
        paste=masks.paste,
    )
    capacity = _USUAL_CHARACTERS_PER_RUN * run_capacity
    while True:
        text, lengths = (tensor.cpu().numpy() for tensor in compress_runs(runs, num_runs, capacity))
        if lengths.max() <= capacity:
            return [
                row[:length].tobytes() for row, length in zip(text, lengths.tolist(), strict=True)
            ]
        capacity = int(lengths.max())
