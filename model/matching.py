"""Assigning candidates to ground-truth boxes."""

from typing import NamedTuple

import torch
from torch import Tensor

from .boxes import pairwise_iou
from .config import SamplingConfig
from .targets import Targets


class Matches(NamedTuple):
    """Assignment of N candidates an image; what is neither positive nor negative is ignored."""

    target: Tensor
    """[B, N] int64: the ground-truth box of highest IoU."""
    positive: Tensor
    """[B, N] bool."""
    negative: Tensor
    """[B, N] bool."""


def match_candidates(
    candidates: Tensor, targets: Targets, config: SamplingConfig, *, low_quality: bool
) -> Matches:
    """Match by IoU (Ren et al., Faster R-CNN, section 3.1.2).

    Args:
        candidates: [N, 4] shared by all images, or [B, N, 4].
        targets: ground truth; padding matches nothing.
        config: the IoU thresholds.
        low_quality: the best candidates of a ground-truth box are positive whatever their IoU,
            unless they do not touch it at all.
    """
    iou_BGN = pairwise_iou(targets.boxes, candidates)
    iou_BGN = torch.where((targets.labels > 0)[:, :, None], iou_BGN, -1.0)
    iou, target = iou_BGN.max(dim=1)
    positive = iou >= config.foreground_iou
    negative = iou < config.background_iou
    if low_quality:
        best = iou_BGN.amax(dim=2, keepdim=True)
        is_best = ((iou_BGN == best) & (best > 0)).any(dim=1)
        positive, negative = positive | is_best, negative & ~is_best
    return Matches(target, positive, negative)
