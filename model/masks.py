"""COCO RLE encoding of masks, and resampling of mask probabilities to images.

This module does not import torch.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..plugins.run_lengths import strings_from_runs

# Rule for resampling mask probabilities into an image. torchvision's rule rounds boxes to whole
# pixels, detectron2's uses the exact boxes.
MaskPaste = Literal["torchvision", "detectron2"]


# Number of pixels that are pasted at a time. Pasting takes about 16 bytes of memory per pixel.
_CHUNK_PIXELS = 1 << 18


class Rle(NamedTuple):
    """Binary mask in COCO's run-length encoding."""

    # Size of the image in pixels.
    height: int
    width: int
    # Compressed lengths of alternating runs, zeros first, in column-major order.
    counts: bytes


def coco_from_rle(rle: Rle) -> dict[str, Any]:
    """Return a mask as COCO JSON: `size` [height, width] and `counts` as text."""
    return {"size": [rle.height, rle.width], "counts": rle.counts.decode("ascii")}


def rle_from_mask(mask: NDArray[np.bool_] | NDArray[np.uint8]) -> Rle:
    """Encode a mask [H, W] as COCO RLE. All pixels other than 0 belong to the object."""
    height, width = mask.shape
    (rle,) = _rles_from_counts(
        [_counts_from_edges(_edges(mask.T != 0), height, width)], height, width
    )
    return rle


def mask_from_rle(rle: Rle) -> NDArray[np.uint8]:
    """Decode a mask to an array [H, W] of 0 and 1.

    Raises:
        ValueError: the runs are damaged, or do not sum to the number of pixels.
    """
    return mask_columns(run_ends(rle), rle.height, 0, rle.width)


def run_ends(rle: Rle) -> NDArray[np.int64]:
    """Return the column-major index of the pixel after each run. The first run consists of zeros.

    Raises:
        ValueError: the runs are damaged, or do not sum to the number of pixels.
    """
    counts = _counts_from_bytes(rle.counts)
    if (counts < 0).any() or counts.sum() != rle.height * rle.width:
        raise ValueError(
            f"the run lengths of the mask's RLE do not add up to {rle.height}x{rle.width} pixels"
        )
    return np.cumsum(counts)


def mask_columns(ends: NDArray[np.int64], height: int, start: int, stop: int) -> NDArray[np.uint8]:
    """Decode the columns `start` to `stop - 1` of a mask to [height, stop - start] of 0 and 1.

    Args:
        ends: result of `run_ends` for the mask.
        height: Height of the mask in pixels.
        start: First column to decode.
        stop: Column after the last one to decode, greater than `start`.
    """
    first, end = start * height, stop * height
    low, high = np.searchsorted(ends, (first, end - 1), side="right")
    lengths = np.diff(ends[low : high + 1].clip(max=end), prepend=first)
    values = (np.arange(low, high + 1) & 1).astype(np.uint8)
    return np.repeat(values, lengths).reshape(stop - start, height).T


class _AxisSamples(NamedTuple):
    """Interpolation along one axis: two mask samples and a weight for each pixel.

    Only the pixels that a box covers are included. The indices of samples refer to the mask with a
    border of one zero sample on each side.
    """

    # First covered pixel; the others follow it.
    first: int
    # Index of the last sample at or before each pixel.
    low: NDArray[np.int64]
    # Index of the sample after `low`. If `low` is the mask's last sample: `low` itself.
    high: NDArray[np.int64]
    # Weight of the sample at `high`.
    fraction: NDArray[np.float32]


def rles_from_probabilities(
    masks: NDArray[np.float32],
    boxes: NDArray[np.float32],
    height: int,
    width: int,
    threshold: float = 0.5,
    paste: MaskPaste = "torchvision",
) -> list[Rle]:
    """Paste mask probabilities into an image, threshold them, and encode the masks.

    The result equals that of `paste_masks_in_image` of torchvision or detectron2, thresholded and
    encoded as COCO RLE. Only pixels within the boxes are computed.

    Args:
        masks: [D, M, M], M x M probabilities for each of D detections.
        boxes: [D, 4] xyxy in pixels of the image.
        height: height of the image in pixels.
        width: width of the image in pixels.
        threshold: pixels above this probability belong to the mask.
        paste: implementation whose resampling rule is used, `torchvision` or `detectron2`.
    """
    bordered = np.pad(masks, ((0, 0), (1, 1), (1, 1)))
    side = bordered.shape[-1]
    if paste == "torchvision":
        edges = whole_pixel_boxes(boxes, masks.shape[-1]).tolist()
        samples_of = _samples_of_whole_pixels
    else:
        edges, samples_of = boxes.tolist(), _exact_samples
    counts = [
        _counts_from_probabilities(
            mask,
            samples_of(left, right, width, side),
            samples_of(top, bottom, height, side),
            height,
            width,
            threshold,
        )
        for mask, (left, top, right, bottom) in zip(bordered, edges, strict=True)
    ]
    return _rles_from_counts(counts, height, width)


def whole_pixel_boxes(boxes: NDArray[np.float32], side: int) -> NDArray[np.int64]:
    """Enlarge boxes around their centres by (side + 2) / side, and truncate them to whole pixels.

    As in torchvision, a mask is padded with one zero sample on each side before it is pasted. The
    enlarged box covers the padded mask.

    Args:
        boxes: [N, 4] xyxy in pixels.
        side: number of samples along a side of a mask, without the padding.

    Returns:
        [N, 4] int64 xyxy: first and last pixel of each enlarged box, both included.
    """
    # The operations are in torchvision's order, because rounding must give the same pixels.
    half = (boxes[:, 2:] - boxes[:, :2]) * np.float32(0.5)
    centre = (boxes[:, 2:] + boxes[:, :2]) * np.float32(0.5)
    half *= np.float32((side + 2) / side)
    expanded = np.concatenate([centre - half, centre + half], axis=1)
    return expanded.astype(np.int64)


def _counts_from_probabilities(
    mask: NDArray[np.float32],
    columns: _AxisSamples,
    rows: _AxisSamples,
    height: int,
    width: int,
    threshold: float,
) -> NDArray[np.int64]:
    """Paste mask probabilities into an image of `height` x `width` pixels, and threshold them.

    `mask` is [S, S], including a border of one zero sample on each side. `columns` and `rows` hold
    the two samples to interpolate for each image column and row within the detection's box.
    Return the run lengths of the thresholded mask in column-major order, zeros first.
    """
    # Interpolate without a matrix product, because BLAS would start threads of its own for that.
    low_SW, high_SW = mask[:, columns.low], mask[:, columns.high]
    rows_SW = low_SW * (1 - columns.fraction) + high_SW * columns.fraction
    fraction_H1 = rows.fraction[:, None]
    # Append a zero to each column of the crop, to end the column's last run. If the crop spans the
    # whole image height, append nothing, because a run can continue in the next column.
    covered = len(rows.low)
    stride = min(covered + 1, height)
    step = max(1, _CHUNK_PIXELS // stride)
    chunks = []
    for start in range(0, len(columns.low), step):
        part_SW = rows_SW[:, start : start + step]
        low_HW = part_SW[rows.low] * (1 - fraction_H1)
        crop_HW = low_HW + part_SW[rows.high] * fraction_H1 > threshold
        closed_WH = np.zeros((crop_HW.shape[1], stride), np.bool_)
        closed_WH[:, :covered] = crop_HW.T
        chunks.append(_edges(closed_WH) + start * stride)
    column, row = np.divmod(_joined(chunks), stride)
    edges = (column + columns.first) * height + row + rows.first
    return _counts_from_edges(edges, height, width)


def _joined(chunks: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Join the edges (flat indices at which a mask's value changes) of consecutive chunks.

    In each chunk, the values before the first and after the last pixel count as 0. So if a run of
    ones crosses the border between two chunks, both chunks have an edge at the border. Drop both
    edges, because the value of the whole mask does not change there.
    """
    edges = np.concatenate(chunks) if chunks else np.zeros(0, np.int64)
    is_inner = np.zeros(len(edges) + 1, np.bool_)
    is_inner[1:-1] = edges[1:] == edges[:-1]
    return edges[~(is_inner[1:] | is_inner[:-1])]


def _samples_of_whole_pixels(start: int, stop: int, size: int, side: int) -> _AxisSamples:
    """Return the mask samples to interpolate for each pixel of an axis, by torchvision's rule.

    The mask covers the pixels `start` to `stop`, both included. Along the axis, the image has
    `size` pixels, and the mask has `side` samples, including one zero sample at each end as its
    border.
    """
    length = max(stop - start + 1, 1)
    first = max(start, 0)
    pixels = np.arange(first, min(stop + 1, size), dtype=np.float32) - np.float32(start)
    scale = np.float32(side) / np.float32(length)
    source = np.maximum((pixels + np.float32(0.5)) * scale - np.float32(0.5), np.float32(0))
    return _samples_at(source, first, side)


def _exact_samples(start: float, stop: float, size: int, side: int) -> _AxisSamples:
    """Return the mask samples to interpolate for each pixel of an axis, by detectron2's rule.

    Boxes are not rounded to whole pixels.

    Args:
        start: first coordinate of the box on this axis, in pixels.
        stop: last coordinate of the box.
        size: size of the image along the axis, in pixels.
        side: number of mask samples along the axis, including a border of one zero at each end. The
            samples without the border span the box.
    """
    cell = (stop - start) / (side - 2)
    if cell <= 0:
        return _samples_at(np.zeros(0, np.float32), 0, side)
    first = max(math.floor(start - cell), 0)
    pixels = np.arange(first, min(math.ceil(stop + cell), size), dtype=np.float32)
    source = (pixels + np.float32(0.5 - start)) / np.float32(cell) + np.float32(0.5)
    return _samples_at(source.clip(0, side - 1), first, side)


def _samples_at(source: NDArray[np.float32], first: int, side: int) -> _AxisSamples:
    low = source.astype(np.int64)
    return _AxisSamples(first, low, np.minimum(low + 1, side - 1), source - low.astype(np.float32))


def _edges(columns: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the flat indices at which the value of a mask [W, H] changes.

    The values before the first and after the last pixel count as 0.
    """
    flat = np.zeros(columns.size + 2, np.bool_)
    flat[1:-1] = columns.ravel()
    return np.flatnonzero(flat[1:] != flat[:-1])


def _counts_from_edges(edges: NDArray[np.int64], height: int, width: int) -> NDArray[np.int64]:
    """Return the run lengths, zeros first, of a mask whose value changes at the indices `edges`."""
    pixels = height * width
    return np.diff(edges[edges < pixels], prepend=0, append=pixels)


def _rles_from_counts(counts: Sequence[NDArray[np.int64]], height: int, width: int) -> list[Rle]:
    """Compress the run lengths of masks of `height` x `width` pixels to COCO RLE."""
    if not counts:
        return []
    num_runs = np.array([len(runs) for runs in counts])
    strings = strings_from_runs(np.concatenate(counts), num_runs)
    return [Rle(height, width, string) for string in strings]


def _counts_from_bytes(data: bytes) -> NDArray[np.int64]:
    characters = np.frombuffer(data, np.uint8).astype(np.int64) - 48
    last = characters & 0x20 == 0
    if not data or not last[-1]:
        raise ValueError("the run-length encoding of the mask is truncated")
    lengths = np.diff(np.flatnonzero(last), prepend=-1)
    starts = np.cumsum(lengths) - lengths
    shifts = 5 * (np.arange(len(characters)) - np.repeat(starts, lengths))
    values = np.add.reduceat((characters & 0x1F) << shifts, starts)
    negative = characters[last] & 0x10 != 0
    values -= np.where(negative, 1 << 5 * lengths, 0)
    values[1::2] = np.cumsum(values[1::2])
    values[2::2] = np.cumsum(values[2::2])
    return values
