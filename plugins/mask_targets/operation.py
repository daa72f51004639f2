"""`maskrcnn::mask_targets_from_crops`: ground-truth masks resampled within RoIs.

Specification of all implementations: a mask covers the whole image or a crop of it, and RoIs are in
pixels of the mask. A RoI is divided into M x M cells, and its mask is pooled by torchvision's
RoIAlign (He et al., Mask R-CNN) with `aligned=False`. A RoI side below one pixel is enlarged to one
pixel. Along each axis, a cell has one sample per mask pixel that it spans, rounded up. The argument
`matched` holds the mask index of each RoI. The target is zero if the index is out of range, if the
RoI is not finite, or if a cell spans 2 ** 24 pixels or more.
"""

import torch
from torch import Tensor
from torchvision.ops import roi_align

from ..runtime.arguments import kernel_argument
from ..runtime.launching import launch_kernel
from .kernel import crop_targets_kernel, crop_targets_launch

# If a cell is at least this many pixels wide or high, float32 does not distinguish its samples.
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


def _measurable(boxes: Tensor, side: int) -> Tensor:
    """Return which boxes [..., 4] are finite and small enough to be sampled: [...] bool.

    `side` is the number of target cells along each side of a box. A cell must span less than
    2 ** 24 pixels.
    """
    cells = (boxes[..., 2:] - boxes[..., :2]) / side
    return boxes.isfinite().all(dim=-1) & (cells < _TOO_LARGE).all(dim=-1)
