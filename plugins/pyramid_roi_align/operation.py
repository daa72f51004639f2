"""`maskrcnn::pyramid_roi_align`: RoIAlign over a feature pyramid for a batch of images.

Specification of all implementations: the number of a level is log2 of its stride in input pixels.
The level of a RoI of width w and height h is
`floor(canonical_level + log2(sqrt(w h) / canonical_size) + 1e-6)`, clamped to the given levels (Lin
et al., Feature Pyramid Networks, eq. 1). Pooling is torchvision's RoIAlign (He et al., Mask R-CNN).
With `aligned=False`, a RoI side below one feature cell is enlarged to one cell. With
`aligned=True`, no RoI is enlarged, and coordinates are shifted by half a cell. The pooled features
of a RoI are zero if its area is NaN or negative, or if a pooled cell spans 2 ** 24 feature cells or
more. Sums are computed in float32, or in float64 for float64 features.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.ops import roi_align

from ..runtime.arguments import kernel_argument
from ..runtime.feature_maps import (
    FEATURE_TYPES,
    check_features,
    empty_like_features,
    in_layout_of,
    is_channels_last,
    map_sizes,
)
from ..runtime.launching import launch_kernel
from .cpu_gradient import roi_align_gradient
from .kernel import (
    MAX_LEVELS,
    Pooling,
    backward_kernel,
    backward_launch,
    finest_level,
    forward_kernel,
    pyramid_roi_align_launch,
)

# If a pooled cell spans at least this many feature cells, float32 does not distinguish its samples.
_TOO_LARGE = 2.0**24


@torch.library.custom_op("maskrcnn::pyramid_roi_align", mutates_args=(), device_types="cpu")
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
    """Pool the features of R RoIs per image. The size of a RoI determines its pyramid level.

    Args:
        features: one tensor [B, C, H_l, W_l] per level, finest first; float16, bfloat16, float32 or
            float64.
        rois: [B, R, 4] float32, xyxy in input pixels.
        output_size: height and width P of the pooled features.
        sampling_ratio: bilinear samples per pooled cell and axis. 0: one per feature cell that
            the pooled cell spans, rounded up.
        spatial_scales: feature cells per input pixel of each level. Scales are powers of two, each
            half of the scale before it.
        canonical_level: log2 of the stride of the level to which RoIs of the canonical size belong.
        canonical_size: canonical size, as the side of a square RoI in input pixels.
        aligned: whether to shift coordinates by half a feature cell.
        inclusive: whether to pool the box `x1, y1, x2 - 1, y2 - 1`, as maskrcnn-benchmark does. The
            level is computed from the whole RoI.

    Returns:
        [B, R, C, P, P] of the features' dtype, channels-last if the first feature map is
        channels-last.

    Raises:
        ValueError: the number of scales differs from the number of levels, there are more than
            `MAX_LEVELS` levels, or a scale is not a power of two or not half of the scale before
            it. On a GPU also: the features differ in dtype, batch size or channels, or have an
            unsupported dtype; a level has 2 ** 31 or more elements per image; or the RoIs are not
            [B, R, 4] float32.
    """
    _check_levels(features, spatial_scales)
    levels = _roi_levels(
        rois, output_size, spatial_scales, canonical_level, canonical_size
    ).flatten()
    dtype = _sum_dtype(features)
    indexed = _indexed_rois(rois.to(dtype), inclusive)
    pooled = _empty_pooled(features, rois, output_size)
    by_roi = pooled.flatten(0, 1).zero_()
    for level, (feature, scale) in enumerate(zip(features, spatial_scales, strict=True)):
        members = (levels == level).nonzero()[:, 0]
        by_roi[members] = roi_align(
            feature.to(dtype), indexed[members], output_size, scale, sampling_ratio, aligned
        ).to(feature.dtype)
    return pooled


@pyramid_roi_align.register_fake
def _(
    features: Sequence[Tensor], rois: Tensor, output_size: int, *_attributes: Any, **_named: Any
) -> Tensor:
    return _empty_pooled(features, rois, output_size)


@pyramid_roi_align.register_kernel("cuda")
def _(features: Sequence[Tensor], rois: Tensor, *attributes: Any) -> Tensor:
    pooling = _pooling_from(attributes)
    _check_levels(features, pooling.spatial_scales)
    check_features(features)
    rois = _roi_argument(rois, features)
    pooled = _empty_pooled(features, rois, pooling.output_size)
    channels_last = is_channels_last(features[0])
    batch, count, channels = pooled.shape[:3]
    kernel = forward_kernel(
        pooling,
        FEATURE_TYPES[features[0].dtype],
        channels,
        channels_last=channels_last,
        pooled_channels_last=channels_last,
    )
    inputs = [*_maps(features, channels_last), rois]
    sizes = map_sizes(features)
    launch = pyramid_roi_align_launch(batch, count, channels, sizes, pooling.output_size)
    launch_kernel(kernel, launch, inputs, [pooled])
    return pooled


@torch.library.custom_op(
    "maskrcnn::pyramid_roi_align_backward", mutates_args=(), device_types="cpu"
)
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
    """Return the gradient of each feature map, [B, C, H_l, W_l].

    `grad` is the gradient of the pooled features, [B, R, C, P, P]. The other arguments are those of
    `pyramid_roi_align`.
    """
    levels = _roi_levels(
        rois, output_size, spatial_scales, canonical_level, canonical_size
    ).flatten()
    dtype = _sum_dtype(features)
    indexed = _indexed_rois(rois.to(dtype), inclusive)
    grad = grad.flatten(0, 1).to(dtype)
    gradients = empty_like_features(features)
    for level, (gradient, scale) in enumerate(zip(gradients, spatial_scales, strict=True)):
        members = (levels == level).nonzero()[:, 0]
        gradient.copy_(
            roi_align_gradient(
                grad[members], indexed[members], scale, sampling_ratio, gradient.shape, aligned
            )
        )
    return gradients


@pyramid_roi_align_backward.register_fake
def _(grad: Tensor, features: Sequence[Tensor], *_rest: Any, **_named: Any) -> list[Tensor]:
    return empty_like_features(features)


@pyramid_roi_align_backward.register_kernel("cuda")
def _(grad: Tensor, features: Sequence[Tensor], rois: Tensor, *attributes: Any) -> list[Tensor]:
    pooling = _pooling_from(attributes)
    check_features(features)
    rois = _roi_argument(rois, features)
    dtype, channels = features[0].dtype, features[0].shape[1]
    shape = (*rois.shape[:2], pooling.output_size, pooling.output_size, channels)
    grad = kernel_argument("grad", grad.movedim(2, -1), dtype, shape)
    kernel = backward_kernel(pooling, FEATURE_TYPES[dtype], channels)
    batch, count = rois.shape[:2]
    launch = backward_launch(kernel, batch, count, channels, map_sizes(features))
    by_pixel = [f.new_empty(f.permute(0, 2, 3, 1).shape) for f in features]
    launch_kernel(kernel, launch, [grad, rois], by_pixel)
    return in_layout_of(by_pixel, features)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    features, rois, *ctx.attributes = inputs
    ctx.save_for_backward(rois, *features)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rois, *features = ctx.saved_tensors
    gradients = pyramid_roi_align_backward(grad, features, rois, *ctx.attributes)
    return gradients, *([None] * (1 + len(ctx.attributes)))


pyramid_roi_align.register_autograd(_backward, setup_context=_setup_context)


def _check_levels(features: Sequence[Tensor], spatial_scales: Sequence[float]) -> None:
    if not 1 <= len(features) == len(spatial_scales) <= MAX_LEVELS:
        raise ValueError(
            f"spatial_scales must have one value per feature map: {len(features)}, not "
            f"{len(spatial_scales)}; 1 to {MAX_LEVELS} feature maps are supported"
        )


def _maps(features: Sequence[Tensor], channels_last: bool) -> list[Tensor]:
    """Return contiguous maps, [B, H_l, W_l, C] if `channels_last`, else [B, C, H_l, W_l]."""
    order = [feature.movedim(1, -1) if channels_last else feature for feature in features]
    return [kernel_argument("features", f, f.dtype, (-1, -1, -1, -1)) for f in order]


def _roi_argument(rois: Tensor, features: Sequence[Tensor]) -> Tensor:
    return kernel_argument("rois", rois, torch.float32, (features[0].shape[0], -1, 4))


def _empty_pooled(features: Sequence[Tensor], rois: Tensor, output_size: int) -> Tensor:
    channels = features[0].shape[1]
    if is_channels_last(features[0]):
        shape = (*rois.shape[:2], output_size, output_size, channels)
        return features[0].new_empty(shape).permute(0, 1, 4, 2, 3)
    return features[0].new_empty(*rois.shape[:2], channels, output_size, output_size)


def _sum_dtype(features: Sequence[Tensor]) -> torch.dtype:
    return torch.promote_types(features[0].dtype, torch.float32)


def _pooling_from(attributes: tuple[Any, ...]) -> Pooling:
    pooling = Pooling(*attributes)
    return pooling._replace(spatial_scales=tuple(pooling.spatial_scales))


def _roi_levels(
    rois: Tensor,
    output_size: int,
    spatial_scales: Sequence[float],
    canonical_level: int,
    canonical_size: float,
) -> Tensor:
    """Return the index of the pyramid level of each RoI [..., 4], as [...] int64.

    Index 0 is the finest level. Index -1 marks RoIs whose pooled features are 0: the area is NaN or
    negative, or a pooled cell spans 2 ** 24 feature cells or more. A RoI has `output_size` pooled
    cells per axis.
    """
    finest = finest_level(spatial_scales)
    coarsest = finest + len(spatial_scales) - 1
    sides = rois[..., 2:] - rois[..., :2]
    size = sides.prod(dim=-1).sqrt()
    level = torch.floor(canonical_level + torch.log2(size / canonical_size) + 1e-6)
    level = level.clamp(finest, coarsest)
    cell = sides.amax(dim=-1) * torch.exp2(-level) / output_size
    return torch.where(cell < _TOO_LARGE, level - finest, -1).to(torch.int64)


def _indexed_rois(rois: Tensor, inclusive: bool) -> Tensor:
    """Convert RoIs [B, R, 4] to torchvision's format [B * R, 5], with the image index first.

    If `inclusive`, reduce x2 and y2 by 1, as maskrcnn-benchmark does before it pools.
    """
    images = torch.arange(rois.shape[0], dtype=rois.dtype, device=rois.device)
    images = images[:, None, None].expand(-1, rois.shape[1], 1)
    near, far = rois[..., :2], rois[..., 2:] - float(inclusive)
    return torch.cat([images, near, far], dim=2).flatten(0, 1)
