"""Batch norm of the box and mask heads, with training statistics from selected RoIs only."""

import torch
from torch import Tensor, nn


class RoiBatchNorm2d(nn.BatchNorm2d):
    """Batch norm that, in training, computes its statistics from selected RoIs only."""

    def forward(self, maps: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Normalise the feature maps of all RoIs. The result has the shape and dtype of `maps`.

        Args:
            maps: [K, C, H, W], feature maps of K RoIs.
            chosen: [B, R] bool for R RoIs in each of B images (K = B * R). True: statistics are
                computed from this RoI. If None or all false, they are computed from all RoIs.
        """
        if chosen is None or not self.training:
            return super().forward(maps)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        # Compute sums of products, because the number of chosen RoIs is known only on the device.
        shares = (chosen | ~chosen.any()).float().view(-1, 1, 1, 1)
        count = shares.sum() * maps[0, 0].numel()
        values = maps.float()
        mean = (values * shares).sum((0, 2, 3), keepdim=True) / count
        centred = values - mean
        variance = (centred.square() * shares).sum((0, 2, 3), keepdim=True) / count
        with torch.no_grad():
            unbiased = variance * count / (count - 1)
            self.running_mean.lerp_(mean.flatten(), self.momentum)
            self.running_var.lerp_(unbiased.flatten(), self.momentum)
            self.num_batches_tracked.add_(1)
        scale = self.weight[:, None, None] * (variance + self.eps).rsqrt()
        return (centred * scale + self.bias[:, None, None]).to(maps.dtype)


def apply_head(head: nn.Module, features: Tensor, chosen: Tensor | None) -> Tensor:
    """Return the output of a head for the pooled features of K RoIs.

    In training, the head's `RoiBatchNorm2d` layers compute statistics from the chosen RoIs only.

    Args:
        head: box or mask head.
        features: [K, C, H, W], pooled features of K RoIs.
        chosen: [B, R] bool, as in `RoiBatchNorm2d.forward`. None: all RoIs.
    """
    if isinstance(head, RoiBatchNorm2d):
        return head(features, chosen)  # type: ignore[no-any-return]
    if chosen is None or not isinstance(head, nn.Sequential):
        return head(features)  # type: ignore[no-any-return]
    for layer in head:
        features = apply_head(layer, features, chosen)
    return features
