"""Losses as sums and counts, so that means over ranks and accumulated batches are exact."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LOSS_NAMES = (
    "loss_objectness",
    "loss_rpn_box_reg",
    "loss_classifier",
    "loss_box_reg",
    "loss_mask",
)
"""torchvision's names, in the order of `LossTerms`."""


class LossTerms(NamedTuple):
    """The five losses before averaging, in the order of `LOSS_NAMES`."""

    sums: Tensor
    """[5] float32."""
    counts: Tensor
    """[5] float32: sampled anchors (twice), sampled RoIs (twice), mask pixels of positives."""

    def means(self, counts: Tensor | None = None) -> Tensor:
        """[5] losses; `counts` replaces the own counts, for example by those of all ranks."""
        return self.sums / (self.counts if counts is None else counts).clamp(min=1)


def smooth_l1_sum(prediction: Tensor, target: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Smooth L1 of [..., 4] deltas, linear from `beta` on, summed where the mask [...] holds.

    Outside the mask targets may be infinite or NaN: they touch neither loss nor gradient.
    """
    target = torch.where(mask[..., None], target, prediction.detach())
    return F.smooth_l1_loss(prediction, target, beta=beta, reduction="sum")
