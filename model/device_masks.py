"""Pasting of masks into images, and COCO RLE encoding of pasted masks, on any device."""

from collections.abc import Iterable
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..plugins.compress_runs import compress_runs
from ..plugins.paste_rle import paste_rle
from .masks import MaskPaste

# The next four constants set the sizes of the mask encoder's two buffers: one for RLE runs, and
# one for the RLE characters of all masks. Masks that exceed a buffer are encoded again. For 100
# masks in an image 1000 pixels wide, the buffers take 7 MB on the device, and 0.4 MB of pinned host
# memory.

# RLE runs per mask. A convex object has two runs per image column, so an object that is 8192 pixels
# wide fits.
RUN_CAPACITY: Final = 1 << 14
# RLE characters per mask and image column, on average over the masks. A convex object has less than
# two characters per column.
_CHARACTERS_PER_COLUMN: Final = 2
# Minimum number of RLE characters per mask, for noisy masks in small images.
_MIN_CHARACTERS: Final = 1 << 12
# Maximum number of RLE characters per batch. Images can have millions of columns.
_MAX_CHARACTERS: Final = 1 << 27

# Maximum number of RLE runs to encode at once when masks that exceeded the buffers are encoded
# again. These runs take 64 MiB on the device, and their text one to two bytes per run.
_REPEATED_RUNS: Final = 1 << 24


class MaskBatch(NamedTuple):
    """Masks of a batch of B images with D detections each, before pasting."""

    # [B, D, M, M] float32.
    probabilities: Tensor
    # [B, D, 4] float32 xyxy in pixels of the source images.
    boxes: Tensor
    # [B, 2] int64, height and width of the source images.
    source_sizes: Tensor
    paste: MaskPaste


def text_capacity(widths: Iterable[int], depth: int) -> int:
    """Return the buffer size in RLE characters to pass to `encode_masks` for a batch.

    Args:
        widths: Width in pixels of each source image.
        depth: Number of masks per image.
    """
    columns = (max(_MIN_CHARACTERS, _CHARACTERS_PER_COLUMN * width) for width in widths)
    return min(_MAX_CHARACTERS, depth * sum(columns))


Array = TypeVar("Array", Tensor, NDArray[Any])


class EncodedMasks(NamedTuple, Generic[Array]):
    """COCO RLE `counts` of a batch's masks: tensors on a device, or arrays on the host."""

    # [capacity] uint8: the characters of all masks.
    text: Array
    # [B * D, 2] int64: start and length of each mask's characters in `text`. The length is -1 if
    # the mask exceeds the buffer for runs. Characters beyond the capacity are missing in `text`,
    # but counted in the lengths.
    spans: Array


def encode_masks(masks: MaskBatch, run_capacity: int, capacity: int) -> EncodedMasks[Tensor]:
    """Paste masks into their source images and encode them as COCO RLE.

    Args:
        masks: Masks on any device.
        run_capacity: Buffer size in RLE runs per mask.
        capacity: Buffer size in RLE characters of all masks together.

    Returns:
        The encoded masks. A mask that exceeds a buffer is missing or truncated; `selected_rles`
        encodes it again.
    """
    depth = masks.boxes.shape[1]
    sizes = masks.source_sizes[:, None].expand(-1, depth, -1).reshape(-1, 2)
    pasted = masks.probabilities.flatten(0, 1), masks.boxes.flatten(0, 1), sizes
    runs = paste_rle(*pasted, run_capacity, paste=masks.paste)
    return EncodedMasks(*compress_runs(*runs, capacity))


def selected_rles(
    masks: MaskBatch, encoded: EncodedMasks[NDArray[Any]], chosen: NDArray[np.intp]
) -> list[bytes]:
    """Return the COCO RLE `counts` of selected masks.

    Masks that did not fit the buffers of `encode_masks` are encoded again in larger buffers.

    Args:
        masks: Masks of the batch, on a device.
        encoded: Output of `encode_masks` for `masks`, copied to the host.
        chosen: [N] indices of the selected masks in the batch: image * D + detection.

    Returns:
        The `counts` of the N masks.
    """
    starts, lengths = encoded.spans[chosen].T
    ends = starts + lengths.clip(min=0)
    counts = _slices(encoded.text, starts, ends)
    exceeding = np.flatnonzero((lengths < 0) | (ends > len(encoded.text)))
    if len(exceeding):
        repeated = _encode_exactly(masks, chosen[exceeding])
        for index, own in zip(exceeding.tolist(), repeated, strict=True):
            counts[index] = own
    return counts


def _encode_exactly(masks: MaskBatch, chosen: NDArray[np.intp]) -> list[bytes]:
    """Encode masks without a limit on their number of RLE runs, and return their COCO `counts`.

    `chosen` [N] holds indices of masks in the batch: image * D + detection, with D detections per
    image.
    """
    # Make few transfers between host and device. Each transfer waits for all earlier work in the
    # stream, which includes this function's work for other batches.
    index = torch.from_numpy(chosen).to(masks.boxes.device)
    probabilities = masks.probabilities.flatten(0, 1)[index]
    boxes = masks.boxes.flatten(0, 1)[index]
    sizes = masks.source_sizes[index // masks.boxes.shape[1]]
    _, num_runs = paste_rle(probabilities, boxes, sizes, 0, paste=masks.paste)
    run_capacity = int(num_runs.max())
    # Encode `size` masks at a time, to limit the memory. The buffer has room for `run_capacity`
    # runs of every mask, but a few noisy masks can have a hundred times as many runs as the others.
    size = max(1, _REPEATED_RUNS // run_capacity)
    counts: list[bytes] = []
    for start in range(0, len(chosen), size):
        part = slice(start, start + size)
        runs = paste_rle(
            probabilities[part], boxes[part], sizes[part], run_capacity, paste=masks.paste
        )
        _, spans = compress_runs(*runs, 0)
        text, spans = compress_runs(*runs, int(spans[:, 1].sum()))
        # The last transfer waits for the stream, so the batch's tensors may be freed afterwards.
        starts, lengths = spans.cpu().numpy().T
        counts += _slices(text.cpu().numpy(), starts, starts + lengths)
    return counts


def _slices(
    text: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> list[bytes]:
    """Return the bytes of `text` in each range from `starts[i]` to `ends[i]` (excluded)."""
    data = text.data
    return [bytes(data[a:b]) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
