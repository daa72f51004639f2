"""Feature pyramids, RoIs, modes and implementations, shared by tests of `pyramid_roi_align`."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torchvision.ops import MultiScaleRoIAlign

from maskrcnn_trt.plugins.pyramid_roi_align import pyramid_roi_align

SCALES = (1 / 4, 1 / 8, 1 / 16, 1 / 32)
SINGLE_SCALE = 1 / 16
HEIGHT, WIDTH = 192, 256
CANONICAL_LEVEL, CANONICAL_SIZE = 4, 64.0
SIDE = 3


class Mode(NamedTuple):
    """Attributes in which implementations of RoIAlign differ."""

    ratio: int = 2
    aligned: bool = False
    inclusive: bool = False


DEFAULT = Mode()
FORMATS = [torch.contiguous_format, torch.channels_last]
MODES = {
    "default": DEFAULT,
    "aligned": Mode(aligned=True),
    "inclusive": Mode(inclusive=True),
    "adaptive": Mode(ratio=0),
    "adaptive, aligned": Mode(ratio=0, aligned=True),
    "adaptive, inclusive": Mode(ratio=0, inclusive=True),
}

Pool = Callable[[Sequence[Tensor], Tensor, Mode], Tensor]


def attributes(levels: int, mode: Mode) -> tuple[object, ...]:
    scales = SCALES if levels > 1 else (SINGLE_SCALE,)
    level_and_size = CANONICAL_LEVEL, CANONICAL_SIZE
    return SIDE, mode.ratio, scales, *level_and_size, mode.aligned, mode.inclusive


def pool_by_torch(features: Sequence[Tensor], rois: Tensor, mode: Mode = DEFAULT) -> Tensor:
    return pyramid_roi_align(features, rois, *attributes(len(features), mode))


def pool_channels_last(features: Sequence[Tensor], rois: Tensor, mode: Mode = DEFAULT) -> Tensor:
    """Pool channels-last features, and check that the result is channels-last."""
    pooled = pool_by_torch(
        [feature.contiguous(memory_format=torch.channels_last) for feature in features], rois, mode
    )
    assert pooled.movedim(2, -1).is_contiguous()
    return pooled


def pool_by_cuda(features: Sequence[Tensor], rois: Tensor, mode: Mode = DEFAULT) -> Tensor:
    return pool_by_torch([feature.cuda() for feature in features], rois.cuda(), mode).cpu()


def pool_channels_last_by_cuda(
    features: Sequence[Tensor], rois: Tensor, mode: Mode = DEFAULT
) -> Tensor:
    return pool_channels_last([feature.cuda() for feature in features], rois.cuda(), mode).cpu()


def pool_by_torchvision(features: Sequence[Tensor], rois: Tensor, mode: Mode = DEFAULT) -> Tensor:
    assert mode == DEFAULT
    pool = MultiScaleRoIAlign(
        [str(level) for level in range(4)],
        SIDE,
        mode.ratio,
        canonical_scale=int(CANONICAL_SIZE),
        canonical_level=CANONICAL_LEVEL,
    )
    maps = {str(level): feature.float() for level, feature in enumerate(features)}
    pooled = pool(maps, list(rois), [(HEIGHT, WIDTH)] * len(rois))
    return pooled.to(features[0].dtype).unflatten(0, rois.shape[:2])


def pyramid(batch: int, dtype: torch.dtype = torch.float32, channels: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(batch)
    return [
        torch.randn(batch, channels, int(HEIGHT * s), int(WIDTH * s), generator=generator).to(dtype)
        for s in SCALES
    ]


def random_rois(batch: int, count: int) -> Tensor:
    """Return RoIs [batch, count, 4] of all pyramid levels. Many cross a border of the image."""
    generator = torch.Generator().manual_seed(count)
    size = torch.tensor([WIDTH, HEIGHT])
    centers = torch.rand(batch, count, 2, generator=generator) * size
    half_sides = 2 ** (1 + 6 * torch.rand(batch, count, 2, generator=generator))
    return torch.cat([centers - half_sides, centers + half_sides], dim=2)


ROIS: dict[str, Tensor] = {
    "no RoI": torch.zeros(2, 0, 4),
    "one image": random_rois(1, 40),
    "three images": random_rois(3, 20),
    "padding and other empty RoIs": torch.tensor(
        [[[0, 0, 0, 0], [50, 60, 50, 90], [50, 60, 90, 60], [255.5, 191.5, 255.5, 191.5]]]
    ).float(),
    "sides at which the level changes": torch.tensor(
        [[[8.3, 7.1, 8.3 + side, 7.1 + side] for side in (31.9, 32.0, 32.1, 63.9, 64, 128, 128.1)]]
    ),
    "over and beyond the borders": torch.tensor(
        [
            [
                [-30, -20, 40, 50],
                [240, 170, 300, 230],
                [-90, 20, -50, 70],
                [-200, -150, 500, 400],
                [300, 250, 340, 290],
            ]
        ]
    ).float(),
    "whole image": torch.tensor([[[0, 0, WIDTH, HEIGHT]]]).float(),
}

# Functions of type `Pool` that run the torch operation on each device and in each memory format.
IMPLEMENTATIONS = [
    pytest.param(pool_by_torch, id="torch-cpu"),
    pytest.param(pool_channels_last, id="torch-cpu-channels-last"),
    pytest.param(pool_by_cuda, id="torch-cuda", marks=pytest.mark.gpu),
    pytest.param(pool_channels_last_by_cuda, id="torch-cuda-channels-last", marks=pytest.mark.gpu),
]
