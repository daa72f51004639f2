"""Mask targets: ground-truth masks resampled within RoIs, from pixels or run lengths.

Contract of all implementations: a RoI is divided into M x M cells, and its mask is pooled by
torchvision's RoIAlign (He et al., Mask R-CNN) with `aligned=False`. A RoI side below one pixel is
enlarged to one pixel. Along each axis, a cell has one sample per mask pixel that it spans, rounded
up. The argument `matched` holds the mask index of each RoI. The target is zero if the index is out
of range, if the box is not finite, or if a cell spans 2 ** 24 pixels or more.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torchvision.ops import roi_align

from ..runtime.arguments import kernel_argument
from ..runtime.launching import launch_kernel
from .kernel import crop_targets_kernel, crop_targets_launch, rle_targets_kernel, rle_targets_launch

# Side of a cell in pixels from which float32 no longer distinguishes the samples of the cell.
_TOO_LARGE = 2.0**24


@torch.library.custom_op("maskrcnn::mask_targets_from_crops", mutates_args=(), device_types="cpu")
def mask_targets_from_crops(masks: Tensor, boxes: Tensor, matched: Tensor, side: int) -> Tensor:
    """Resample pixel masks within RoIs to mask targets.

    Args:
        masks: [B, G, H, W] uint8, G masks per image. A mask covers the image or a crop of it.
        boxes: [B, K, 4] float32, K RoIs per image, xyxy in pixels of the masks.
        matched: [B, K] int64, index of each RoI's mask among the G masks of its image.
        side: height and width M of a target.

    Returns:
        [B, K, M, M] float32, the mask's average in each cell.
    """
    targets = torch.zeros(*matched.shape, side, side)
    instances = masks.shape[1]
    chosen = (matched >= 0) & (matched < instances) & _measurable(boxes, side)
    if masks.numel() > 0:
        owners = torch.arange(len(masks))[:, None] * instances + matched
        rois = torch.cat([owners[chosen][:, None].float(), boxes[chosen]], dim=1)
        targets[chosen] = roi_align(masks.flatten(0, 1)[:, None].float(), rois, side)[:, 0]
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
    """Resample run-length masks within RoIs to mask targets.

    Pixels after a mask's last run are background.

    Args:
        counts: [R] int32, concatenated COCO run lengths of all masks. The first run of a mask is
            background.
        offsets: [N + 1] int64, index of each mask's first run in `counts`, and then R.
        sizes: [N, 2] int64, height and width of each of N masks.
        boxes: [K, 4] float32, K RoIs, xyxy in pixels of the masks.
        matched: [K] int64, mask index of each RoI.
        side: height and width M of a target.

    Returns:
        [K, M, M] float32, the mask's average in each cell.
    """
    targets = torch.zeros(len(matched), side, side)
    for owner, members in rois_by_owner(boxes, matched, len(sizes)):
        runs = counts[offsets[owner] : offsets[owner + 1]]
        mask = _mask_from_runs(runs, *sizes[owner].tolist())
        only = torch.zeros(1, len(members), dtype=torch.int64)
        own = mask_targets_from_crops(mask[None, None], boxes[members][None], only, side)
        targets[members] = own[0]
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
    """Yield the index of each instance that has RoIs, and the indices [n] of its RoIs.

    RoIs are skipped if their box is not finite or their instance index is out of range.

    Args:
        boxes: [K, 4], boxes of K RoIs.
        matched: [K] int64, instance index of each RoI.
        instances: number of instances.
    """
    owned = (matched >= 0) & (matched < instances) & boxes.isfinite().all(dim=1)
    for owner in torch.unique(matched[owned]).tolist():
        yield owner, (owned & (matched == owner)).nonzero()[:, 0]


def _measurable(boxes: Tensor, side: int) -> Tensor:
    """Return whether each box [..., 4] is finite and small enough to be sampled, as [...] bool.

    `side` is the number of target cells along each side of a box. A cell must span less than
    2 ** 24 pixels.
    """
    cells = (boxes[..., 2:] - boxes[..., :2]) / side
    return boxes.isfinite().all(dim=-1) & (cells < _TOO_LARGE).all(dim=-1)


def _mask_from_runs(runs: Tensor, height: int, width: int) -> Tensor:
    """Decode run lengths to a mask [H, W] uint8."""
    values = torch.arange(len(runs)).to(torch.uint8) % 2
    pixels = values.repeat_interleave(runs.long())[: height * width]
    mask = torch.zeros(height * width, dtype=torch.uint8)
    mask[: len(pixels)] = pixels
    return mask.view(width, height).T
