"""Types, validation and memory layouts of feature maps: one tensor [B, C, H_l, W_l] per level."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .arguments import FLOAT_TYPES

# Names of C++ types in kernels, by dtype of the feature maps.
FEATURE_TYPES = {**FLOAT_TYPES, torch.float64: "double"}


def check_features(features: Sequence[Tensor]) -> None:
    """Check that the CUDA kernels support the given feature maps.

    Raises:
        ValueError: the maps differ in dtype, batch size or channels, or have an unsupported dtype,
            or a map has 2 ** 31 or more elements per image.
    """
    first = features[0]
    if first.dtype not in FEATURE_TYPES:
        supported = " or ".join(map(str, FEATURE_TYPES))
        raise ValueError(f"features must be {supported}, not {first.dtype}")
    for feature in features:
        if feature.dtype != first.dtype or feature.shape[:2] != first.shape[:2]:
            raise ValueError(
                "features must have the same dtype, batch size and number of channels, not "
                f"{feature.dtype} "
                f"{list(feature.shape)} and {first.dtype} {list(first.shape)}"
            )
        if feature.shape[1:].numel() >= 2**31:
            raise ValueError(
                f"features must have fewer than 2 ** 31 elements per image and level, not "
                f"{list(feature.shape)}"
            )


def map_sizes(features: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return height and width of each feature map."""
    return [(feature.shape[2], feature.shape[3]) for feature in features]


def is_channels_last(feature: Tensor) -> bool:
    """Return whether the channels of a feature map are next to one another in memory."""
    # Read only the channels' stride. In an export, reading the batch axis would fix its symbolic
    # size.
    return feature.stride(1) == 1


def empty_like_features(features: Sequence[Tensor]) -> list[Tensor]:
    """Return uninitialised tensors with the dtype, shape and memory layout of each feature map."""
    return [
        feature.new_empty(feature.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2)
        if is_channels_last(feature)
        else feature.new_empty(feature.shape)
        for feature in features
    ]


def in_layout_of(by_pixel: Sequence[Tensor], features: Sequence[Tensor]) -> list[Tensor]:
    """Permute tensors [B, H_l, W_l, C] to [B, C, H_l, W_l], in the feature maps' memory layouts."""
    maps = [tensor.permute(0, 3, 1, 2) for tensor in by_pixel]
    return [
        own if is_channels_last(feature) else own.contiguous()
        for own, feature in zip(maps, features, strict=True)
    ]
