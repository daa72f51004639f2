"""`maskrcnn::nms_keep`: exact greedy non-maximum suppression of many padded sets at once.

Contract, held by every implementation: a box is suppressed by a kept box that comes before it, is
of the same class, and overlaps it by more than the threshold. IoU is intersection over union of
xyxy boxes without the legacy +1; it and the threshold are compared in single precision. What has no
area, or an IoU that is no number, neither suppresses nor is suppressed. Boxes of a negative class
are padding: they are never kept and suppress nothing. Of a set, the first `max_keep` that survive
are kept.
"""

import torch
from torch import Tensor
from torchvision.ops import nms

from .arguments import kernel_argument
from .kernels.nms_keep import MAX_BOXES, nms_keep_kernel, nms_keep_launch
from .launching import launch_kernel


@torch.library.custom_op("maskrcnn::nms_keep", mutates_args=(), device_types="cpu")
def nms_keep(boxes: Tensor, classes: Tensor, iou_threshold: float, max_keep: int) -> Tensor:
    """Which boxes survive.

    Args:
        boxes: [N, K, 4] float32, xyxy, each set sorted by descending score.
        classes: [N, K] int64; negative marks padding.
        iou_threshold: larger overlaps are suppressed; 0 to 1.
        max_keep: boxes kept of a set, the first that survive; 0, all of them. On a GPU, work ends
            where the limit is reached.

    Returns:
        [N, K] bool.

    Raises:
        ValueError: on a GPU, a set has more than 16384 boxes, or an argument another dtype or
            shape.
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
    if max_keep:
        keep &= keep.cumsum(dim=1) <= max_keep
    return keep


@nms_keep.register_fake
def _(boxes: Tensor, classes: Tensor, iou_threshold: float, max_keep: int) -> Tensor:
    return classes.new_empty(classes.shape, dtype=torch.bool)


@nms_keep.register_kernel("cuda")
def _(boxes: Tensor, classes: Tensor, iou_threshold: float, max_keep: int) -> Tensor:
    boxes = kernel_argument("boxes", boxes, torch.float32, (-1, -1, 4))
    sets, count, _ = boxes.shape
    classes = kernel_argument("classes", classes, torch.int64, (sets, count))
    if count > MAX_BOXES:
        raise ValueError(f"nms_keep takes at most {MAX_BOXES} boxes a set, not {count}")
    keep = classes.new_empty(classes.shape, dtype=torch.bool)
    kernel = nms_keep_kernel(iou_threshold, max_keep)
    launch_kernel(kernel, nms_keep_launch(sets, count), [boxes, classes], [keep])
    return keep
