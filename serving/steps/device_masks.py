"""Conversion of boxes and masks to the pixels of the source images, on the GPU."""

from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...model.masks import MaskPaste
from ...plugins.compress_runs import compress_runs
from ...plugins.paste_rle import paste_rle


def scales_and_limits(
    sizes: NDArray[np.int64], source_sizes: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return the factors that scale boxes to the source images, and the limits that clip them.

    Args:
        sizes: [B, 2], height and width of the resized images.
        source_sizes: [B, 2], height and width of the source images.

    Returns:
        [2, B, 1, 4]: factors of xyxy, and upper limits of xyxy in pixels of the source images.
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
        run_capacity: Buffer size in runs per mask.
        capacity: Buffer size in RLE characters per mask.
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
    image: int,
    rows: NDArray[np.intp],
) -> list[bytes]:
    """Return the COCO RLE `counts` of selected masks of one image.

    Masks that did not fit the buffers of `encode_masks` are encoded again in larger ones.

    Args:
        masks: Masks of the batch, on a device.
        encoded: Output of `encode_masks` for them, copied to the host.
        run_capacity: The `run_capacity` given to `encode_masks`.
        image: Index of the image in the batch.
        rows: [N], indices of the selected masks of that image.
    """
    text, lengths, num_runs = (array[image] for array in encoded)
    lengths, num_runs = lengths[rows], num_runs[rows]
    counts = [
        text[row, :length].tobytes()
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)
    ]
    exceeding = np.flatnonzero((num_runs > run_capacity) | (lengths > text.shape[1]))
    if len(exceeding):
        repeated = _encode_exactly(masks, image, rows[exceeding])
        for index, own in zip(exceeding.tolist(), repeated, strict=True):
            counts[index] = own
    return counts


def _encode_exactly(masks: MaskBatch, image: int, rows: NDArray[np.intp]) -> list[bytes]:
    """Return the COCO RLE `counts` of masks of one image, in buffers of the needed size."""
    chosen = torch.from_numpy(rows).to(masks.boxes.device)
    own = (
        masks.probabilities[image][chosen],
        masks.boxes[image][chosen],
        masks.source_sizes[image].expand(len(rows), 2),
    )
    _, num_runs = paste_rle(*own, 0, paste=masks.paste)
    runs, _ = paste_rle(*own, int(num_runs.max()), paste=masks.paste)
    _, lengths = compress_runs(runs, num_runs, 0)
    text, _ = compress_runs(runs, num_runs, int(lengths.max()))
    return [
        row[:length].tobytes()
        for row, length in zip(text.cpu().numpy(), lengths.tolist(), strict=True)
    ]
