"""From the model's outputs on a device to boxes and encoded masks of the source images."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..model.masks import MaskPaste
from ..plugins.compress_runs import compress_runs
from ..plugins.paste_rle import paste_rle


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


class MaskStrings(NamedTuple):
    """The `counts` of COCO's encoding of a batch's masks, on a device or on the host."""

    text: Tensor
    """[B, D, capacity] uint8, of which anything may follow a string."""
    lengths: Tensor
    """[B, D] int32, those of the strings; -1 where a mask found no room."""


def strings_of_masks(masks: Masks, run_capacity: int, capacity: int) -> MaskStrings:
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
    whole = (num_runs <= run_capacity) & (lengths <= capacity)
    lengths = torch.where(whole, lengths, -1)
    return MaskStrings(text.view(images, depth, capacity), lengths.view(images, depth))


def chosen_strings(
    masks: Masks, strings: MaskStrings, image: int, rows: NDArray[np.intp]
) -> list[bytes]:
    """The strings of some masks of an image; what found no room is pasted again.

    Args:
        masks: What was pasted.
        strings: What it gave, on the host.
        image: Place of the image in the batch.
        rows: [N], which of its masks.
    """
    text, lengths = strings.text[image].numpy(), strings.lengths[image].numpy()[rows]
    chosen = [
        text[row, :length].tobytes()
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)
    ]
    lost = np.flatnonzero(lengths < 0)
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
