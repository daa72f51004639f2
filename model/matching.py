"""Assigning candidates to ground-truth boxes."""

from typing import NamedTuple

from torch import Tensor

from ..plugins.match_boxes import match_boxes
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
    own = candidates if candidates.dim() == 3 else candidates[None]
    thresholds = config.foreground_iou, config.background_iou
    return Matches(*match_boxes(targets.boxes, targets.labels, own, *thresholds, low_quality))
