"""Pasting of mask probabilities into images as COCO run lengths.

Specification of all implementations, whose results are equal bit for bit: a mask gets a border of
one zero sample on each side, and its box is enlarged by this border. The mask is interpolated over
the enlarged box, in float32, linearly in x and then in y. Pixels beyond the centre of the first or
last sample get the value of that sample. A pixel belongs to the mask if its value exceeds the
threshold. There are two rules for the enlarged box:

- torchvision's rule: the coordinates are truncated to integers, and the box includes the pixels at
  its right and bottom edges.
- detectron2's rule: the coordinates are not rounded.

The mask is empty if the box is not finite, or if the absolute value of a coordinate exceeds 2 ** 24
pixels. Above this limit, float32 does not represent all integers.

COCO's run lengths are in column-major order. The first run is of zeros, and its length may be 0.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..runtime.arguments import FLOAT_TYPES, kernel_argument
from ..runtime.launching import launch_kernel
from .kernel import paste_rle_kernel, paste_rle_launch

# Largest absolute coordinate of a box in pixels.
_FARTHEST = 2.0**24


class _PixelSamples(NamedTuple):
    """Mask samples from which P image pixels are interpolated along one axis of a box.

    Indices refer to the mask with a border of zeros: index 0 is in the border.
    """

    # [P] int64, image rows or columns that the enlarged box covers.
    pixels: Tensor
    # [P] int64, index of the last sample at or before each pixel.
    low: Tensor
    # [P] int64, index of the next sample, at most the last one.
    high: Tensor
    # [P] float32, weight of the sample at `high`.
    fraction: Tensor


def paste_rle(
    masks: Tensor,
    boxes: Tensor,
    sizes: Tensor,
    capacity: int,
    threshold: float = 0.5,
    paste: str = "torchvision",
) -> tuple[Tensor, Tensor]:
    """Paste masks into their images' pixels, and return COCO run lengths.

    Args:
        masks: [N, M, M], M x M probabilities of N masks, float32 or float16.
        boxes: [N, 4] float32, xyxy in pixels of the image.
        sizes: [N, 2] int64, height and width of each mask's image (fewer than 2 ** 30 pixels).
        capacity: maximum number of runs per mask.
        threshold: pixels above this probability belong to the mask; 0 or more.
        paste: rule for the enlarged boxes. `torchvision`: truncate them to whole pixels.
            `detectron2`: do not round them.

    Returns:
        run lengths [N, capacity] int32, undefined after the last run; and the number of runs [N]
        int32, including runs beyond the capacity.

    Raises:
        ValueError: `paste` is unknown or, on a GPU, an argument has another dtype or shape than
            documented.
    """
    exact = _is_exact(paste)
    num_runs = masks.new_empty(len(masks), dtype=torch.int32)
    counts = num_runs.new_empty(len(masks), capacity)
    if masks.is_cuda:
        dtype = torch.float16 if masks.dtype == torch.float16 else torch.float32
        side = masks.shape[-1]
        inputs = [
            kernel_argument("masks", masks, dtype, (-1, side, side)),
            kernel_argument("boxes", boxes, torch.float32, (len(masks), 4)),
            kernel_argument("sizes", sizes, torch.int64, (len(masks), 2)),
        ]
        kernel = paste_rle_kernel(FLOAT_TYPES[dtype], side, threshold, exact=exact)
        launch_kernel(kernel, paste_rle_launch(*counts.shape), inputs, [counts, num_runs])
        return counts, num_runs
    for index, (height, width) in enumerate(sizes.tolist()):
        pasted = _pasted(masks[index].float(), boxes[index], height, width, threshold, exact)
        runs = _runs(pasted)
        num_runs[index] = len(runs)
        counts[index, : len(runs)] = runs[:capacity]
    return counts, num_runs


def _is_exact(paste: str) -> bool:
    if paste not in ("torchvision", "detectron2"):
        raise ValueError(f"paste must be torchvision or detectron2, not {paste!r}")
    return paste == "detectron2"


def _pasted(
    mask: Tensor, box: Tensor, height: int, width: int, threshold: float, exact: bool
) -> Tensor:
    """Paste a mask [M, M] into an image, at a box [4] that is xyxy in the image's pixels.

    Return the transposed image, in COCO's order: [W, H] bool. If `exact`, use detectron2's rule,
    which does not round the enlarged box, else torchvision's.
    """
    image = torch.zeros(width, height, dtype=torch.bool)
    if not bool((box.abs() <= _FARTHEST).all()):
        return image
    samples_of = _exact_samples if exact else _samples_of_whole_pixels
    columns = samples_of(box[0], box[2], width, len(mask))
    rows = samples_of(box[1], box[3], height, len(mask))
    bordered = F.pad(mask, (1, 1, 1, 1))
    across = _between(bordered[:, columns.low], bordered[:, columns.high], columns.fraction)
    values = _between(across[rows.low], across[rows.high], rows.fraction[:, None])
    image[columns.pixels[:, None], rows.pixels] = (values > threshold).T
    return image


def _samples_of_whole_pixels(near: Tensor, far: Tensor, size: int, side: int) -> _PixelSamples:
    centre, half = (far + near) * 0.5, (far - near) * 0.5 * ((side + 2) / side)
    start, stop = int(centre - half), int(centre + half) + 1
    pixels = torch.arange(max(start, 0), max(min(stop, size), start, 0))
    scale = torch.tensor(side + 2.0) / max(stop - start, 1)
    source = (pixels.float() - start + 0.5) * scale - 0.5
    return _samples_at(source, pixels, side)


def _exact_samples(near: Tensor, far: Tensor, size: int, side: int) -> _PixelSamples:
    start, stop = near.item(), far.item()
    cell = (stop - start) / side
    first, end = math.floor(start - cell), math.ceil(stop + cell)
    first = max(first, 0)
    pixels = torch.arange(first, max(min(end, size), first) if cell > 0 else first)
    source = (pixels + torch.tensor(0.5 - start)) / torch.tensor(cell) + 0.5
    return _samples_at(source, pixels, side)


def _samples_at(source: Tensor, pixels: Tensor, side: int) -> _PixelSamples:
    source = source.clamp(0, side + 1)
    low = source.long()
    return _PixelSamples(pixels, low, (low + 1).clamp(max=side + 1), source - low)


def _between(low: Tensor, high: Tensor, fraction: Tensor) -> Tensor:
    return low * (1 - fraction) + high * fraction


def _runs(mask: Tensor) -> Tensor:
    """Return the lengths of the runs of equal values in a mask, in memory order, zeros first."""
    flat = mask.flatten()
    edges = flat.diff(prepend=flat.new_zeros(1)).nonzero()[:, 0]
    bounds = torch.cat([edges.new_zeros(1), edges, edges.new_tensor([flat.numel()])])
    return bounds.diff()
