"""From the model's outputs on a device to boxes and run lengths in pixels of the source images."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..model.masks import MaskPaste
from ..plugins.paste_rle import paste_rle
from ..plugins.run_lengths import strings_from_runs


def boxes_in_sources(boxes: Tensor, sizes: Tensor, source_sizes: Tensor) -> Tensor:
    """Scale boxes as `postprocessing.detections_from_outputs` does, and clip them to the images.

    Args:
        boxes: [B, D, 4] float32 xyxy in pixels of the images as the model saw them.
        sizes: [B, 2] int64, their height and width.
        source_sizes: [B, 2] int64, height and width of the source images.

    Returns:
        [B, D, 4] in pixels of the source images.
    """
    limits_B14 = _corners(source_sizes)
    scaled = boxes * (limits_B14 / _corners(sizes))
    return torch.minimum(scaled.clamp_(min=0), limits_B14)


def _corners(sizes: Tensor) -> Tensor:
    """[B, 1, 4] float32: width, height, width, height."""
    return sizes.flip(1).repeat(1, 2)[:, None].float()


class Masks(NamedTuple):
    """Masks of a batch of B images with D each."""

    probabilities: Tensor
    """[B, D, M, M] float32."""
    boxes: Tensor
    """[B, D, 4] float32 xyxy in pixels of the source images."""
    source_sizes: Tensor
    """[B, 2] int64, height and width of the source images."""
    paste: MaskPaste


def run_lengths(masks: Masks, capacity: int) -> tuple[Tensor, Tensor]:
    """Run lengths of masks in their source images.

    Args:
        masks: On any device.
        capacity: Runs of a mask that there is room for.

    Returns:
        Lengths [B, D, capacity] int32, zero after the last, and their number [B, D] int32, which
        counts those too that found no room.
    """
    images, depth = masks.boxes.shape[:2]
    lengths, num_runs = paste_rle(
        masks.probabilities.flatten(0, 1),
        masks.boxes.flatten(0, 1),
        masks.source_sizes.repeat_interleave(depth, dim=0, output_size=images * depth),
        capacity,
        paste=masks.paste,
    )
    return lengths.view(images, depth, capacity), num_runs.view(images, depth)


def strings_of_masks(
    masks: Masks,
    image: int,
    rows: NDArray[np.intp],
    lengths: NDArray[np.int32],
    num_runs: NDArray[np.int32],
) -> list[bytes]:
    """Compress the run lengths of masks of an image; what found no room is pasted again.

    Args:
        masks: What was pasted.
        image: Place of the image in the batch.
        rows: [N], which of its masks are wanted.
        lengths: [D, capacity] of the image, as `run_lengths` gave them, on the host.
        num_runs: [D], likewise.

    Returns:
        The `counts` of COCO's encoding, N of them.
    """
    counts = num_runs[rows]
    runs = [
        lengths[row, :count]
        if count <= lengths.shape[1]
        else _runs_of_one(masks, image, row, count)
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True)
    ]
    return strings_from_runs(np.concatenate([lengths[:0].ravel(), *runs]), counts)


def _runs_of_one(masks: Masks, image: int, row: int, count: int) -> NDArray[np.int32]:
    images, rows = slice(image, image + 1), slice(row, row + 1)
    one = Masks(
        masks.probabilities[images, rows],
        masks.boxes[images, rows],
        masks.source_sizes[images],
        masks.paste,
    )
    lengths, _ = run_lengths(one, count)
    runs: NDArray[np.int32] = lengths.cpu().numpy().ravel()
    return runs
