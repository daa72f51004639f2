"""`maskrcnn::nms_keep`: exact greedy non-maximum suppression in padded sets of boxes.

Specification of all implementations: a box is suppressed by an earlier kept box of its set and
class if their IoU exceeds the threshold. Of the boxes that are not suppressed, the first `max_keep`
of each set are kept. Boxes are xyxy with sides x2 - x1 and y2 - y1. IoU and threshold are compared
in float32. Boxes without area neither suppress nor are suppressed, and no box suppresses another
one if their IoU is NaN. Boxes of a negative class are padding: they are never kept and suppress
nothing.
"""

import torch
from torch import Tensor
from torchvision.ops import nms

from ..runtime.arguments import kernel_argument
from ..runtime.launching import launch_kernel
from .kernel import (
    MAX_BOXES,
    nms_keep_kernel,
    nms_keep_launch,
    number_of_tiles,
    overlaps_launch,
)


@torch.library.custom_op("maskrcnn::nms_keep", mutates_args=(), device_types="cpu")
def nms_keep(boxes: Tensor, classes: Tensor, iou_threshold: float, max_keep: int) -> Tensor:
    """Return which boxes non-maximum suppression keeps.

    Args:
        boxes: [N, K, 4] float32, N sets of K boxes, xyxy; each set is sorted by descending score.
        classes: [N, K] int64; negative marks padding.
        iou_threshold: a box is suppressed if its IoU with a kept box is larger; 0 to 1.
        max_keep: maximum number of kept boxes per set. 0: no limit.

    Returns:
        [N, K] bool, True for each kept box.

    Raises:
        ValueError: on a GPU, a set has more than 16384 boxes, or an argument has another dtype or
            shape than documented.
    """
    keep = torch.zeros(classes.shape, dtype=torch.bool)
    # Round the threshold to float32. torchvision's CPU code compares float32 IoUs with a double,
    # and an IoU of 0.6 in float32 exceeds 0.6 as a double.
    iou_threshold = torch.tensor(iou_threshold, dtype=torch.float32).item()
    # Descending scores that keep the order of the boxes.
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
        raise ValueError(
            f"boxes of shape {list(boxes.shape)}: on a GPU, nms_keep takes at most {MAX_BOXES} "
            "boxes per set (second axis)"
        )
    keep = classes.new_empty(classes.shape, dtype=torch.bool)
    overlaps, select = (
        nms_keep_kernel(iou_threshold, max_keep, "bool", name)
        for name in ("nms_overlaps", "nms_select")
    )
    suppressors = classes.new_empty(sets, number_of_tiles(count), count)
    launch_kernel(overlaps, overlaps_launch(sets, count), [boxes, classes], [suppressors])
    launch_kernel(select, nms_keep_launch(sets, count), [classes, suppressors], [keep])
    return keep
