"""`maskrcnn::feature_patches`: square patches of feature maps, with gradient.

Specification of all implementations: a patch has 2 * radius + 1 cells per axis around its centre.
Cells of a patch that are outside of the map are zero. The gradient of a feature map is the sum of
the gradients of all patches, in float32, or in float64 for float64 features. It is rounded once to
the dtype of the features.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..runtime.arguments import kernel_argument
from ..runtime.compilation import Launch
from ..runtime.feature_maps import (
    FEATURE_TYPES,
    check_features,
    empty_like_features,
    in_layout_of,
    map_sizes,
)
from ..runtime.launching import launch_kernel
from .kernel import (
    MAX_LEVELS,
    feature_patches_backward_kernel,
    feature_patches_kernel,
    feature_patches_launch,
)


@torch.library.custom_op("maskrcnn::feature_patches", mutates_args=(), device_types="cpu")
def feature_patches(features: Sequence[Tensor], centres: Tensor, radius: int) -> Tensor:
    """Copy S patches per image out of feature maps.

    Args:
        features: one map [B, C, H_l, W_l] for each of L levels; on a GPU float16, bfloat16, float32
            or float64.
        centres: [B, S] int64, indices of the patches' centres, from 0 to N - 1. N is the number of
            cells of all maps. The cells are numbered by map, row and column. If the index is out of
            this range, the patch is undefined.
        radius: patches have K = 2 * radius + 1 cells per axis.

    Returns:
        [B, S, K, K, C] of the features' dtype.

    Raises:
        ValueError: on a GPU: there are more than `MAX_LEVELS` maps, the maps differ in dtype, batch
            size or channels or have an unsupported dtype, or the centres are not [B, S] int64.
    """
    patches = _empty_patches(features, centres, radius)
    for feature, (image, sample, cells) in zip(
        features, _members(features, centres, radius), strict=True
    ):
        padded = F.pad(feature, [radius] * 4).movedim(1, -1)
        patches[image, sample] = padded.flatten(0, 2)[cells]
    return patches


@feature_patches.register_fake
def _(features: Sequence[Tensor], centres: Tensor, radius: int) -> Tensor:
    return _empty_patches(features, centres, radius)


@feature_patches.register_kernel("cuda")
def _(features: Sequence[Tensor], centres: Tensor, radius: int) -> Tensor:
    _check(features)
    patches = _empty_patches(features, centres, radius)
    dtype, channels = features[0].dtype, features[0].shape[1]
    maps = [kernel_argument("features", f.movedim(1, -1), dtype, (-1,) * 4) for f in features]
    kernel = feature_patches_kernel(FEATURE_TYPES[dtype], len(features), radius, channels)
    launch = _launch(features, centres, radius)
    launch_kernel(kernel, launch, [*maps, _centres_argument(features, centres)], [patches])
    return patches


@torch.library.custom_op("maskrcnn::feature_patches_backward", mutates_args=(), device_types="cpu")
def feature_patches_backward(
    grad: Tensor, features: Sequence[Tensor], centres: Tensor, radius: int
) -> list[Tensor]:
    """Return the gradient of each feature map, [B, C, H_l, W_l].

    `grad` is the gradient of the patches, [B, S, K, K, C]. The other arguments are those of
    `feature_patches`.
    """
    dtype = torch.promote_types(grad.dtype, torch.float32)
    gradients = empty_like_features(features)
    members = _members(features, centres, radius)
    for gradient, (image, sample, cells) in zip(gradients, members, strict=True):
        batch, channels, height, width = gradient.shape
        padded = grad.new_zeros(
            batch, height + 2 * radius, width + 2 * radius, channels, dtype=dtype
        )
        rows = grad[image, sample].to(dtype).flatten(0, 2)
        # Unlike `index_put_`, `scatter_add_` adds in a fixed order.
        padded.flatten(0, 2).scatter_add_(0, cells.flatten()[:, None].expand_as(rows), rows)
        inner = padded[:, radius : radius + height, radius : radius + width]
        gradient.copy_(inner.movedim(-1, 1))
    return gradients


@feature_patches_backward.register_fake
def _(grad: Tensor, features: Sequence[Tensor], centres: Tensor, radius: int) -> list[Tensor]:
    return empty_like_features(features)


@feature_patches_backward.register_kernel("cuda")
def _(grad: Tensor, features: Sequence[Tensor], centres: Tensor, radius: int) -> list[Tensor]:
    _check(features)
    dtype, channels = features[0].dtype, features[0].shape[1]
    shape = (*centres.shape, *[2 * radius + 1] * 2, channels)
    grad = kernel_argument("grad", grad, dtype, shape)
    kernel = feature_patches_backward_kernel(FEATURE_TYPES[dtype], len(features), radius, channels)
    launch = _launch(features, centres, radius)
    by_pixel = [feature.new_zeros(feature.movedim(1, -1).shape) for feature in features]
    launch_kernel(kernel, launch, [grad, _centres_argument(features, centres)], by_pixel)
    return in_layout_of(by_pixel, features)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    features, centres, ctx.radius = inputs
    ctx.save_for_backward(centres, *features)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    centres, *features = ctx.saved_tensors
    return feature_patches_backward(grad, features, centres, ctx.radius), None, None


feature_patches.register_autograd(_backward, setup_context=_setup_context)


def _members(
    features: Sequence[Tensor], centres: Tensor, radius: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return three index tensors per feature map, which describe the patches centred in the map.

    For the N patches of a map, the tensors are: index of the patch's image [N], index of the patch
    in its image [N], and indices of the patch's cells [N, K, K]. Cells are numbered by image, row
    and column of the map, after the map is padded by `radius` cells on each side.
    """
    members = []
    offsets = torch.arange(2 * radius + 1, device=centres.device)
    for feature in features:
        height, width = feature.shape[2:]
        image, sample = ((centres >= 0) & (centres < height * width)).nonzero(as_tuple=True)
        cell = centres[image, sample][:, None]
        rows = image[:, None] * (height + 2 * radius) + cell // width + offsets
        columns = cell % width + offsets
        cells = rows[:, :, None] * (width + 2 * radius) + columns[:, None]
        members.append((image, sample, cells))
        centres = centres - height * width
    return members


def _empty_patches(features: Sequence[Tensor], centres: Tensor, radius: int) -> Tensor:
    sides = [2 * radius + 1] * 2
    return features[0].new_empty(*centres.shape, *sides, features[0].shape[1])


def _launch(features: Sequence[Tensor], centres: Tensor, radius: int) -> Launch:
    (batch, patches), channels = centres.shape, features[0].shape[1]
    return feature_patches_launch(batch, patches, radius, channels, map_sizes(features))


def _centres_argument(features: Sequence[Tensor], centres: Tensor) -> Tensor:
    return kernel_argument("centres", centres, torch.int64, (features[0].shape[0], -1))


def _check(features: Sequence[Tensor]) -> None:
    """Raise ValueError if the kernels in `feature_patches.cu` do not support the feature maps."""
    if not 1 <= len(features) <= MAX_LEVELS:
        raise ValueError(f"feature_patches takes 1 to {MAX_LEVELS} maps, not {len(features)}")
    check_features(features)
