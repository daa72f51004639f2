"""Training losses as sums and counts, which give exact means over ranks and accumulated batches."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# torchvision's names, in the order of `LossTerms`.
LOSS_NAMES = ("loss_objectness", "loss_rpn_box_reg", "loss_classifier", "loss_box_reg", "loss_mask")


class LossTerms(NamedTuple):
    """Sums of the five losses, and the counts to divide them by, in the order of `LOSS_NAMES`."""

    # [5] float32.
    sums: Tensor
    # [5] float32, in the order of `LOSS_NAMES`: sampled anchors (twice), sampled RoIs (twice),
    # mask pixels of positive RoIs.
    counts: Tensor

    def means(self, counts: Tensor | None = None) -> Tensor:
        """Return the five mean losses [5].

        Args:
            counts: [5], divisors of the sums, such as the counts of all ranks together. None:
                `self.counts`.
        """
        return self.sums / (self.counts if counts is None else counts).clamp(min=1)


def smooth_l1_sum(prediction: Tensor, target: Tensor, mask: Tensor, beta: float) -> Tensor:
    """Return the sum of the smooth L1 loss over the deltas [..., 4] whose `mask` [...] is True.

    The loss is linear for errors above `beta`. Targets outside of the mask may be infinite or NaN.
    """
    # Outside of the mask, set the target to the prediction. It then adds nothing to the loss and
    # its gradient.
    target = torch.where(mask[..., None], target, prediction.detach())
    return F.smooth_l1_loss(prediction, target, beta=beta, reduction="sum")
