"""`maskrcnn::pyramid_roi_align`: RoIAlign over a feature pyramid, for a whole batch of images.

Contract, held by every implementation: the level of a RoI of width w and height h is
`floor(canonical_level + log2(sqrt(w h) / canonical_size) + 1e-6)`, clamped to the levels given
(Lin et al., Feature Pyramid Networks, eq. 1); features come finest first. Pooling is RoIAlign
(He et al., Mask R-CNN) as torchvision defines it: unaligned, a RoI counts as at least one feature
cell wide and high; aligned, coordinates are shifted by half a cell, and it does not.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import roi_align

_roi_align_backward = torch.ops.torchvision._roi_align_backward


@torch.library.custom_op("maskrcnn::pyramid_roi_align", mutates_args=())
def pyramid_roi_align(
    features: Sequence[Tensor],
    rois: Tensor,
    output_size: int,
    sampling_ratio: int,
    spatial_scales: Sequence[float],
    canonical_level: int,
    canonical_size: float,
    aligned: bool,
    inclusive: bool,
) -> Tensor:
    """Pooled features of every RoI.

    Args:
        features: a [B, C, H_l, W_l] tensor a level, finest first; floating point.
        rois: [B, R, 4] float32, xyxy in input pixels.
        output_size: side P of the pooled square.
        sampling_ratio: bilinear samples a cell and axis; 0, as many as the cell spans features.
        spatial_scales: feature cells an input pixel, one a level; powers of two.
        canonical_level: log2 of the stride of the level that holds RoIs of canonical size.
        canonical_size: side of such a RoI in input pixels.
        aligned: shift by half a cell.
        inclusive: pool from `x1, y1` to `x2 - 1, y2 - 1`, the far pixels' near edges, as legacy
            implementations do; the level is that of the whole RoI.

    Returns:
        [B, R, C, P, P], of the features' dtype.
    """
    levels = roi_levels(rois, spatial_scales, canonical_level, canonical_size).flatten()
    indexed = _indexed_rois(rois, inclusive)
    pooled = rois.new_zeros(levels.numel(), features[0].shape[1], output_size, output_size)
    for level, (feature, scale) in enumerate(zip(features, spatial_scales, strict=True)):
        members = (levels == level).nonzero()[:, 0]
        pooled[members] = roi_align(
            feature.float(), indexed[members], output_size, scale, sampling_ratio, aligned
        )
    return pooled.to(features[0].dtype).view(*rois.shape[:2], *pooled.shape[1:])


@pyramid_roi_align.register_fake
def _(
    features: Sequence[Tensor], rois: Tensor, output_size: int, *_attributes: Any, **_named: Any
) -> Tensor:
    batch, count, _ = rois.shape
    return features[0].new_empty(batch, count, features[0].shape[1], output_size, output_size)


@torch.library.custom_op("maskrcnn::pyramid_roi_align_backward", mutates_args=())
def pyramid_roi_align_backward(
    grad: Tensor,
    features: Sequence[Tensor],
    rois: Tensor,
    output_size: int,
    sampling_ratio: int,
    spatial_scales: Sequence[float],
    canonical_level: int,
    canonical_size: float,
    aligned: bool,
    inclusive: bool,
) -> list[Tensor]:
    """Gradients of the features, each like its level, from that of the pooled ones."""
    levels = roi_levels(rois, spatial_scales, canonical_level, canonical_size).flatten()
    indexed = _indexed_rois(rois, inclusive)
    grad = grad.flatten(0, 1).float()
    gradients = []
    for level, (feature, scale) in enumerate(zip(features, spatial_scales, strict=True)):
        members = (levels == level).nonzero()[:, 0]
        gradient = _roi_align_backward(
            grad[members], indexed[members], scale, output_size, output_size,
            *feature.shape, sampling_ratio, aligned,
        )  # fmt: skip
        gradients.append(gradient.to(feature.dtype))
    return gradients


@pyramid_roi_align_backward.register_fake
def _(grad: Tensor, features: Sequence[Tensor], *_rest: Any, **_named: Any) -> list[Tensor]:
    return [torch.empty_like(feature) for feature in features]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    features, rois, *ctx.attributes = inputs
    ctx.save_for_backward(rois, *features)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rois, *features = ctx.saved_tensors
    gradients = pyramid_roi_align_backward(grad, features, rois, *ctx.attributes)
    return gradients, *([None] * (1 + len(ctx.attributes)))


pyramid_roi_align.register_autograd(_backward, setup_context=_setup_context)


def roi_levels(
    rois: Tensor, spatial_scales: Sequence[float], canonical_level: int, canonical_size: float
) -> Tensor:
    """Index into the pyramid of every RoI: [..., 4] xyxy to [...] int64."""
    finest, coarsest = (
        round(-math.log2(scale)) for scale in (spatial_scales[0], spatial_scales[-1])
    )
    area = (rois[..., 2] - rois[..., 0]) * (rois[..., 3] - rois[..., 1])
    level = torch.floor(canonical_level + torch.log2(area.sqrt() / canonical_size) + 1e-6)
    return (level.clamp(finest, coarsest) - finest).to(torch.int64)


def _indexed_rois(rois: Tensor, inclusive: bool) -> Tensor:
    """[B, R, 4] to torchvision's [B R, 5], whose first column is the image."""
    images = torch.arange(rois.shape[0], dtype=rois.dtype, device=rois.device)
    images = images[:, None, None].expand(-1, rois.shape[1], 1)
    near, far = rois[..., :2], rois[..., 2:] - float(inclusive)
    return torch.cat([images, near, far], dim=2).flatten(0, 1)
