"""Ground-truth masks within RoIs, from masks of pixels or run lengths.

Contract, held by every implementation: a mask is averaged within the cells of a RoI by RoIAlign
(He et al., Mask R-CNN) as torchvision defines it: unaligned, a RoI is at least a pixel wide and
high, and there are as many samples as a cell spans pixels. `matched` names the mask of each RoI. A
RoI gets zeros whose number is no mask's, whose box is not finite, or whose cells span 2 ** 24
pixels, as then their samples cannot be told apart.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torchvision.ops import roi_align

from .arguments import kernel_argument
from .kernels.mask_targets import (
    crop_targets_kernel,
    crop_targets_launch,
    rle_targets_kernel,
    rle_targets_launch,
)
from .launching import launch_kernel

_TOO_LARGE = 2.0**24


@torch.library.custom_op("maskrcnn::mask_targets_from_crops", mutates_args=(), device_types="cpu")
def mask_targets_from_crops(masks: Tensor, boxes: Tensor, matched: Tensor, side: int) -> Tensor:
    """Targets from masks of pixels, whole or cropped.

    Args:
        masks: [B, G, H, W] uint8.
        boxes: [B, K, 4] float32, xyxy in pixels of the masks.
        matched: [B, K] int64, the mask of each RoI.
        side: M.

    Returns:
        [B, K, M, M] float32.

    Raises:
        ValueError: on a GPU, an argument has another dtype or shape.
    """
    targets = torch.zeros(*matched.shape, side, side)
    for image in range(len(masks)):
        for owner, members in rois_by_owner(boxes[image], matched[image], masks.shape[1]):
            averages = _averages(masks[image, owner], boxes[image, members], side)
            targets[image, members] = averages
    return targets


@mask_targets_from_crops.register_fake
def _(masks: Tensor, boxes: Tensor, matched: Tensor, side: int) -> Tensor:
    return boxes.new_empty(*matched.shape, side, side)


@mask_targets_from_crops.register_kernel("cuda")
def _(masks: Tensor, boxes: Tensor, matched: Tensor, side: int) -> Tensor:
    masks = kernel_argument("masks", masks, torch.uint8, (-1, -1, -1, -1))
    images, instances, height, width = masks.shape
    boxes = kernel_argument("boxes", boxes, torch.float32, (images, -1, 4))
    rois = boxes.shape[1]
    matched = kernel_argument("matched", matched, torch.int64, (images, rois))
    targets = boxes.new_empty(images, rois, side, side)
    launch = crop_targets_launch(images, rois, instances, height, width)
    launch_kernel(crop_targets_kernel(side), launch, [masks, boxes, matched], [targets])
    return targets


@torch.library.custom_op("maskrcnn::mask_targets_from_rle", mutates_args=(), device_types="cpu")
def mask_targets_from_rle(
    counts: Tensor, offsets: Tensor, sizes: Tensor, boxes: Tensor, matched: Tensor, side: int
) -> Tensor:
    """Targets from COCO's run lengths; what they leave open at the end of a mask is background.

    Args:
        counts: [R] int32, uncompressed run lengths of one mask after another, zeros first.
        offsets: [N + 1] int64, where in `counts` each mask begins, and where the last ends.
        sizes: [N, 2] int64, height and width of the masks.
        boxes: [K, 4] float32, xyxy in pixels of the masks.
        matched: [K] int64, the mask of each RoI.
        side: M.

    Returns:
        [K, M, M] float32.

    Raises:
        ValueError: on a GPU, an argument has another dtype or shape.
    """
    targets = torch.zeros(len(matched), side, side)
    for owner, members in rois_by_owner(boxes, matched, len(sizes)):
        runs = counts[offsets[owner] : offsets[owner + 1]]
        mask = _mask_from_runs(runs, *sizes[owner].tolist())
        targets[members] = _averages(mask, boxes[members], side)
    return targets


@mask_targets_from_rle.register_fake
def _(
    counts: Tensor, offsets: Tensor, sizes: Tensor, boxes: Tensor, matched: Tensor, side: int
) -> Tensor:
    return boxes.new_empty(matched.shape[0], side, side)


@mask_targets_from_rle.register_kernel("cuda")
def _(
    counts: Tensor, offsets: Tensor, sizes: Tensor, boxes: Tensor, matched: Tensor, side: int
) -> Tensor:
    rois, instances = matched.shape[0], sizes.shape[0]
    ends = kernel_argument("counts", counts, torch.int32, (-1,)).cumsum(0)
    inputs = [
        ends,
        kernel_argument("offsets", offsets, torch.int64, (instances + 1,)),
        kernel_argument("sizes", sizes, torch.int64, (instances, 2)),
        kernel_argument("boxes", boxes, torch.float32, (rois, 4)),
        kernel_argument("matched", matched, torch.int64, (rois,)),
    ]
    targets = boxes.new_empty(rois, side, side)
    launch_kernel(rle_targets_kernel(side), rle_targets_launch(rois, instances), inputs, [targets])
    return targets


def rois_by_owner(boxes: Tensor, matched: Tensor, instances: int) -> Iterator[tuple[int, Tensor]]:
    """Instances that own RoIs with finite boxes, and the indices of these.

    Args:
        boxes: [K, 4].
        matched: [K] int64, the instance of each RoI.
        instances: other numbers than 0 to this less one are left out.
    """
    owned = (matched >= 0) & (matched < instances) & boxes.isfinite().all(dim=1)
    for owner in torch.unique(matched[owned]).tolist():
        yield owner, (owned & (matched == owner)).nonzero()[:, 0]


def _averages(mask: Tensor, boxes: Tensor, side: int) -> Tensor:
    """[K, M, M] of a mask [H, W] and boxes [K, 4]."""
    averages = torch.zeros(len(boxes), side, side)
    if mask.numel() > 0:
        measurable = ((boxes[:, 2:] - boxes[:, :2]) / side < _TOO_LARGE).all(dim=1)
        pixels = mask[None, None].float()
        averages[measurable] = roi_align(pixels, [boxes[measurable]], side)[:, 0]
    return averages


def _mask_from_runs(runs: Tensor, height: int, width: int) -> Tensor:
    """[H, W] uint8."""
    values = torch.arange(len(runs)).to(torch.uint8) % 2
    pixels = values.repeat_interleave(runs.long())[: height * width]
    mask = torch.zeros(height * width, dtype=torch.uint8)
    mask[: len(pixels)] = pixels
    return mask.view(width, height).T
