"""`maskrcnn::paste_rle`: mask probabilities pasted into images, as COCO run lengths.

Contract, held by every implementation bit for bit: a mask, between one sample of zeros on each
side, is stretched bilinearly over its box in single precision, along rows first; a pixel belongs
to it where it exceeds the threshold. As torchvision pastes, the box with this border is cut to
whole pixels, the far ones included, and pixels before the first sample's middle repeat it; as
detectron2 does, the box is taken as it is. A box that is not finite or lies 2 ** 24 pixels off,
where single precision runs out of whole pixels, has an empty mask.

COCO's run lengths go down one column after another; zeros first, so that the first may be 0.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .arguments import kernel_argument
from .kernels.paste_rle import paste_rle_kernel, paste_rle_launch
from .launching import launch_kernel

_FARTHEST = 2.0**24
_CUDA_TYPES = {torch.float32: "float", torch.float16: "float16"}


class _Samples(NamedTuple):
    """Where the P pixels of an axis that a box covers lie in its mask, border included."""

    pixels: Tensor
    """[P] int64."""
    low: Tensor
    """[P] int64, last sample of the mask before each pixel."""
    high: Tensor
    """[P] int64, the sample after it."""
    fraction: Tensor
    """[P] float32, weight of the latter."""


@torch.library.custom_op("maskrcnn::paste_rle", mutates_args=(), device_types="cpu")
def paste_rle(
    masks: Tensor,
    boxes: Tensor,
    sizes: Tensor,
    capacity: int,
    threshold: float = 0.5,
    paste: str = "torchvision",
) -> tuple[Tensor, Tensor]:
    """Run lengths of masks at the size of their images.

    Args:
        masks: [N, M, M] probabilities, float32 or float16.
        boxes: [N, 4] float32, xyxy in pixels of the image.
        sizes: [N, 2] int64, height and width of each mask's image, of fewer than 2 ** 30 pixels.
        capacity: runs a mask there is room for.
        threshold: pixels above this probability belong to the mask; 0 or more.
        paste: `torchvision` or `detectron2`, whose rule places the probabilities.

    Returns:
        Lengths [N, capacity] int32, zero after the last run, and the number of runs [N] int32,
        which counts those too that found no room.

    Raises:
        ValueError: the rule is unknown or, on a GPU, an argument has another dtype or shape.
    """
    exact = _is_exact(paste)
    counts, num_runs = _empty_runs(masks, capacity)
    counts.zero_()
    for index, (height, width) in enumerate(sizes.tolist()):
        pasted = _pasted(masks[index].float(), boxes[index], height, width, threshold, exact)
        runs = _runs(pasted)
        num_runs[index] = len(runs)
        counts[index, : len(runs)] = runs[:capacity]
    return counts, num_runs


@paste_rle.register_fake
def _(
    masks: Tensor, _boxes: Tensor, _sizes: Tensor, capacity: int, *_rest: object, **_named: object
) -> tuple[Tensor, Tensor]:
    return _empty_runs(masks, capacity)


@paste_rle.register_kernel("cuda")
def _(
    masks: Tensor,
    boxes: Tensor,
    sizes: Tensor,
    capacity: int,
    threshold: float = 0.5,
    paste: str = "torchvision",
) -> tuple[Tensor, Tensor]:
    dtype = torch.float16 if masks.dtype == torch.float16 else torch.float32
    side = masks.shape[-1]
    masks = kernel_argument("masks", masks, dtype, (-1, side, side))
    count = masks.shape[0]
    inputs = [
        masks,
        kernel_argument("boxes", boxes, torch.float32, (count, 4)),
        kernel_argument("sizes", sizes, torch.int64, (count, 2)),
    ]
    counts, num_runs = _empty_runs(masks, capacity)
    kernel = paste_rle_kernel(_CUDA_TYPES[dtype], side, threshold, exact=_is_exact(paste))
    launch_kernel(kernel, paste_rle_launch(count, capacity), inputs, [counts, num_runs])
    return counts, num_runs


def _empty_runs(masks: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    count = masks.shape[0]
    num_runs = masks.new_empty(count, dtype=torch.int32)
    return num_runs.new_empty(count, capacity), num_runs


def _is_exact(paste: str) -> bool:
    if paste not in ("torchvision", "detectron2"):
        raise ValueError(f"paste must be torchvision or detectron2, not {paste!r}")
    return paste == "detectron2"


def _pasted(
    mask: Tensor, box: Tensor, height: int, width: int, threshold: float, exact: bool
) -> Tensor:
    """[W, H] bool: a column of the image after another, as COCO's runs go."""
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


def _samples_of_whole_pixels(near: Tensor, far: Tensor, size: int, side: int) -> _Samples:
    centre, half = (far + near) * 0.5, (far - near) * 0.5 * ((side + 2) / side)
    start, stop = int(centre - half), int(centre + half) + 1
    pixels = torch.arange(max(start, 0), max(min(stop, size), start, 0))
    scale = torch.tensor(side + 2.0) / max(stop - start, 1)
    source = (pixels.float() - start + 0.5) * scale - 0.5
    return _samples_at(source, pixels, side)


def _exact_samples(near: Tensor, far: Tensor, size: int, side: int) -> _Samples:
    start, stop = near.item(), far.item()
    cell = (stop - start) / side
    first, end = math.floor(start - cell), math.ceil(stop + cell)
    first = max(first, 0)
    pixels = torch.arange(first, max(min(end, size), first) if cell > 0 else first)
    source = (pixels + torch.tensor(0.5 - start)) / torch.tensor(cell) + 0.5
    return _samples_at(source, pixels, side)


def _samples_at(source: Tensor, pixels: Tensor, side: int) -> _Samples:
    source = source.clamp(0, side + 1)
    low = source.long()
    return _Samples(pixels, low, (low + 1).clamp(max=side + 1), source - low)


def _between(low: Tensor, high: Tensor, fraction: Tensor) -> Tensor:
    return low * (1 - fraction) + high * fraction


def _runs(mask: Tensor) -> Tensor:
    """Lengths of the runs in memory order, zeros first."""
    flat = mask.flatten()
    edges = flat.diff(prepend=flat.new_zeros(1)).nonzero()[:, 0]
    bounds = torch.cat([edges.new_zeros(1), edges, edges.new_tensor([flat.numel()])])
    return bounds.diff()
