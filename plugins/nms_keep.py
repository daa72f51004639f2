"""`maskrcnn::nms_keep`: exact greedy non-maximum suppression of many padded sets at once.

Contract, held by every implementation: a box is suppressed by a kept box that comes before it, is
of the same class, and overlaps it by more than the threshold. IoU is intersection over union of
xyxy boxes without the legacy +1; it and the threshold are compared in single precision. Boxes of a
negative class are padding: they are never kept and suppress nothing.
"""

import torch
from torch import Tensor
from torchvision.ops import nms


@torch.library.custom_op("maskrcnn::nms_keep", mutates_args=(), device_types="cpu")
def nms_keep(boxes: Tensor, classes: Tensor, iou_threshold: float) -> Tensor:
    """Which boxes survive.

    Args:
        boxes: [N, K, 4] float32, xyxy, each set sorted by descending score.
        classes: [N, K] int64; negative marks padding.
        iou_threshold: larger overlaps are suppressed.

    Returns:
        [N, K] bool.
    """
    keep = torch.zeros(classes.shape, dtype=torch.bool)
    # torchvision compares in double precision on a CPU, where an IoU of 0.6 exceeds 0.6.
    iou_threshold = torch.tensor(iou_threshold, dtype=torch.float32).item()
    ranks = torch.arange(classes.shape[1], 0, -1, dtype=boxes.dtype)
    for set_boxes, set_classes, set_keep in zip(boxes, classes, keep, strict=True):
        for label in set_classes.unique():
            if label < 0:
                continue
            members = (set_classes == label).nonzero()[:, 0]
            set_keep[members[nms(set_boxes[members], ranks[members], iou_threshold)]] = True
    return keep


@nms_keep.register_fake
def _(boxes: Tensor, classes: Tensor, iou_threshold: float) -> Tensor:
    return torch.empty_like(classes, dtype=torch.bool)


@nms_keep.register_kernel("cuda")
def _keep_by_fixed_point(boxes: Tensor, classes: Tensor, iou_threshold: float) -> Tensor:
    """Keep what no kept box suppresses, repeated until nothing changes.

    Each round settles at least one more box of every chain of suppressions, and the only fixed
    point is the greedy answer.
    """
    suppresses_NKK = _suppression(boxes, classes, iou_threshold).float()
    valid = classes >= 0
    keep, settled = valid, False
    while not settled:
        hits = torch.bmm(keep.float()[:, None], suppresses_NKK)[:, 0]
        renewed = valid & (hits == 0)
        settled = bool((renewed == keep).all())
        keep = renewed
    return keep


def _suppression(boxes: Tensor, classes: Tensor, iou_threshold: float) -> Tensor:
    """[N, K, K] bool: would box i, if kept, suppress box j; only for i before j."""
    top_left = torch.maximum(boxes[:, :, None, :2], boxes[:, None, :, :2])
    bottom_right = torch.minimum(boxes[:, :, None, 2:], boxes[:, None, :, 2:])
    sides = (bottom_right - top_left).clamp(min=0)
    intersection = sides[..., 0] * sides[..., 1]
    area = (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])
    iou = intersection / (area[:, :, None] + area[:, None, :] - intersection)
    same_class = (classes[:, :, None] == classes[:, None, :]) & (classes[:, :, None] >= 0)
    return ((iou > iou_threshold) & same_class).triu(diagonal=1)
