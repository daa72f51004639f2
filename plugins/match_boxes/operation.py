"""`maskrcnn::match_boxes`: matching of candidates to ground-truth boxes by IoU.

Specification of all implementations (Ren et al., Faster R-CNN, section 3.1.2), whose results are
equal bit for bit: a candidate is matched to the ground-truth box of highest IoU, the first one in
case of ties. The candidate is positive if that IoU reaches the foreground threshold, and negative
if it is below the background threshold. If the argument `low_quality` is True, the thresholds do
not apply to the candidates of highest IoU with each ground-truth box: unless this IoU is 0, these
candidates are positive and not negative. `maskrcnn::box_iou` specifies the IoU. Label 0 marks
padding, which never matches.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..box_iou import box_iou
from ..runtime.arguments import kernel_argument
from ..runtime.launching import launch_kernel
from .kernel import MATCH_BEST, match_best_launch, match_boxes_kernel, match_boxes_launch


@torch.library.custom_op("maskrcnn::match_boxes", mutates_args=(), device_types="cpu")
def match_boxes(
    boxes: Tensor,
    labels: Tensor,
    candidates: Tensor,
    foreground_iou: float,
    background_iou: float,
    low_quality: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Match N candidates (anchors or RoIs) per image to G ground-truth boxes.

    Args:
        boxes: [B, G, 4] float32, ground truth, xyxy.
        labels: [B, G] int64; 0 marks padding.
        candidates: [B, N, 4], or [1, N, 4] shared by all images; float32, xyxy.
        foreground_iou: smallest IoU of positive candidates.
        background_iou: candidates with a smaller IoU are negative. At most `foreground_iou`.
        low_quality: True: the candidates of highest IoU with each box are positive and not
            negative, even if this IoU is below the thresholds. An IoU of 0 is never positive.

    Returns:
        target [B, N] int64, the index of each candidate's matched box, 0 for images without ground
        truth; positive [B, N] bool; and negative [B, N] bool.
    """
    iou_BGN = torch.where((labels > 0)[:, :, None], box_iou(boxes, candidates), -1.0)
    if labels.shape[1] == 0:
        # `max` needs at least one row: add one that never matches.
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
