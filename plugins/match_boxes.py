"""`maskrcnn::match_boxes`: assignment of candidates to ground-truth boxes by IoU.

Contract, held by every implementation to the bit (Ren et al., Faster R-CNN, section 3.1.2): the
target of a candidate is the ground-truth box of highest IoU, the first of several. It is positive
from the foreground's threshold on, and negative below the background's. With `low_quality`, what
reaches the highest IoU that any candidate has with some ground-truth box is positive too, unless
that is 0. IoU is that of `maskrcnn::box_iou`; labels of 0 mark padding, which matches nothing.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .arguments import kernel_argument
from .box_iou import box_iou
from .kernels.match_boxes import (
    MATCH_BEST,
    match_best_launch,
    match_boxes_kernel,
    match_boxes_launch,
)
from .launching import launch_kernel


@torch.library.custom_op("maskrcnn::match_boxes", mutates_args=(), device_types="cpu")
def match_boxes(
    boxes: Tensor,
    labels: Tensor,
    candidates: Tensor,
    foreground_iou: float,
    background_iou: float,
    low_quality: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Targets of candidates, and which are positive and negative.

    Args:
        boxes: [B, G, 4] float32, ground truth, xyxy.
        labels: [B, G] int64; 0 marks padding.
        candidates: [B, N, 4], or [1, N, 4] shared by all images; float32, xyxy.
        foreground_iou: least IoU of positives.
        background_iou: negatives have less; at most `foreground_iou`.
        low_quality: the best candidates of a box are positive whatever their IoU.

    Returns:
        targets [B, N] int64, 0 where there is no ground truth; positive [B, N] bool; negative
        [B, N] bool.

    Raises:
        ValueError: on a GPU, an argument has another dtype or shape.
    """
    iou_BGN = torch.where((labels > 0)[:, :, None], box_iou(boxes, candidates), -1.0)
    if labels.shape[1] == 0:
        # A row that matches nothing stands in for ground truth.
        iou_BGN = F.pad(iou_BGN, (0, 0, 0, 1), value=-1.0)
    iou, target = iou_BGN.max(dim=1)
    positive = iou >= foreground_iou
    negative = iou < background_iou
    if low_quality and candidates.shape[1] > 0:
        best = iou_BGN.amax(dim=2, keepdim=True)
        is_best = ((iou_BGN == best) & (best > 0)).any(dim=1)
        positive, negative = positive | is_best, negative & ~is_best
    return target, positive, negative


@match_boxes.register_fake
def _(
    _boxes: Tensor, labels: Tensor, candidates: Tensor, *_attributes: object, **_named: object
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_matches(labels, candidates)


@match_boxes.register_kernel("cuda")
def _(
    boxes: Tensor,
    labels: Tensor,
    candidates: Tensor,
    foreground_iou: float,
    background_iou: float,
    low_quality: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    boxes = kernel_argument("boxes", boxes, torch.float32, (-1, -1, 4))
    batch, count, _ = boxes.shape
    labels = kernel_argument("labels", labels, torch.int64, (batch, count))
    shared = candidates.shape[0] == 1
    candidates = kernel_argument(
        "candidates", candidates, torch.float32, (1 if shared else batch, -1, 4)
    )
    target, positive, negative = _empty_matches(labels, candidates)
    outputs = [target, positive, negative]
    if low_quality:
        highest = boxes.new_empty(positive.shape)
        best = labels.new_zeros(labels.shape, dtype=torch.int32)
        outputs += [highest, best]
    launch_kernel(
        match_boxes_kernel(foreground_iou, background_iou, low_quality=low_quality),
        match_boxes_launch(batch, count, candidates.shape[1], shared=shared),
        [boxes, labels, candidates],
        outputs,
    )
    if low_quality:
        launch_kernel(
            MATCH_BEST,
            match_best_launch(batch, count, candidates.shape[1], shared=shared),
            [boxes, candidates, highest, best],
            [positive, negative],
        )
    return target, positive, negative


def _empty_matches(labels: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shape = (labels.shape[0], candidates.shape[1])
    positive, negative = (labels.new_empty(shape, dtype=torch.bool) for _ in range(2))
    return labels.new_empty(shape), positive, negative
