"""From the model's outputs on a device to boxes and encoded masks of the source images."""

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
    """What takes boxes to the source images, by the host, as it would be ten kernels of a device.

    Args:
        sizes: [B, 2], height and width of the images as the model sees them.
        source_sizes: [B, 2], height and width of the source images.

    Returns:
        [2, B, 1, 4]: factors of xyxy, and their limits in pixels of the source images.
    """
    corners, limits = (
        pairs[:, None, [1, 0, 1, 0]].astype(np.float32) for pairs in (sizes, source_sizes)
    )
    return np.stack([limits / corners, limits])


def boxes_in_sources(boxes: Tensor, scales: Tensor, limits: Tensor) -> Tensor:
    """Scale boxes as `postprocessing.detections_from_outputs` does, and clip them to the images.

    Args:
        boxes: [B, D, 4] float32 xyxy in pixels of the images as the model saw them.
        scales: [B, 1, 4] float32 of `scales_and_limits`.
        limits: [B, 1, 4] float32 of `scales_and_limits`.

    Returns:
        [B, D, 4] in pixels of the source images.
    """
    return torch.minimum((boxes * scales).clamp_(min=0), limits)


class Masks(NamedTuple):
    """Masks of a batch of B images with D each."""

    probabilities: Tensor
    """[B, D, M, M] float32."""
    boxes: Tensor
    """[B, D, 4] float32 xyxy in pixels of the source images."""
    source_sizes: Tensor
    """[B, 2] int64, height and width of the source images."""
    paste: MaskPaste


Array = TypeVar("Array", Tensor, NDArray[Any])


class MaskStrings(NamedTuple, Generic[Array]):
    """The `counts` of COCO's encoding of a batch's masks; NumPy's on the host."""

    text: Array
    """[B, D, capacity] uint8, of which anything may follow a string."""
    lengths: Array
    """[B, D] int32, those of the strings, which may be more than there was room for."""
    num_runs: Array
    """[B, D] int32, those of the masks; where there was no room for them, the rest is of no use."""


def strings_of_masks(masks: Masks, run_capacity: int, capacity: int) -> MaskStrings[Tensor]:
    """Paste masks into their source images, and encode them.

    Args:
        masks: On any device.
        run_capacity: Runs of a mask that there is room for.
        capacity: Characters of a string that there is room for.
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
    return MaskStrings(
        text.view(images, depth, capacity),
        lengths.view(images, depth),
        num_runs.view(images, depth),
    )


def chosen_strings(
    masks: Masks,
    strings: MaskStrings[NDArray[Any]],
    run_capacity: int,
    image: int,
    rows: NDArray[np.intp],
) -> list[bytes]:
    """The strings of some masks of an image; what found no room is pasted again.

    Args:
        masks: What was pasted.
        strings: What it gave.
        run_capacity: Runs of a mask that there was room for.
        image: Place of the image in the batch.
        rows: [N], which of its masks.
    """
    text, lengths, num_runs = (array[image] for array in strings)
    lengths, num_runs = lengths[rows], num_runs[rows]
    chosen = [
        text[row, :length].tobytes()
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)
    ]
    lost = np.flatnonzero((num_runs > run_capacity) | (lengths > text.shape[1]))
    if len(lost):
        found = _strings_with_room(masks, image, rows[lost])
        for place, string in zip(lost.tolist(), found, strict=True):
            chosen[place] = string
    return chosen


def _strings_with_room(masks: Masks, image: int, rows: NDArray[np.intp]) -> list[bytes]:
    """The strings of some masks of an image, with as much room as they need."""
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
