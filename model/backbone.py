"""Residual networks and what the heads see of them, under torchvision's parameter names."""

from collections.abc import Callable
from functools import partial
from typing import Literal, Self

from torch import Tensor, nn
from torchvision.models import resnet
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.ops import FrozenBatchNorm2d
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

from .config import PYRAMID_STRIDES, BackboneConfig

Norm = Literal["none", "frozen_bn", "bn", "gn"]

_STAGES = (("conv1", "bn1"), ("layer1",), ("layer2",), ("layer3",), ("layer4",))
_LAST_STAGES = {
    "fpn": ("layer1", "layer2", "layer3", "layer4"),
    "c4": ("layer3",),
    "c5": ("layer4",),
}


def norm_layer(norm: Norm, eps: float = 1e-5) -> Callable[[int], nn.Module] | None:
    """What makes a normalisation of so many channels; None for `none`."""
    kinds: dict[Norm, Callable[[int], nn.Module] | None] = {
        "none": None,
        "frozen_bn": partial(FrozenBatchNorm2d, eps=eps),
        "bn": partial(nn.BatchNorm2d, eps=eps),
        "gn": partial(nn.GroupNorm, 32, eps=eps),
    }
    return kinds[norm]


def feature_strides(config: BackboneConfig) -> tuple[int, ...]:
    """Input pixels a cell of each of the backbone's maps, finest first."""
    return PYRAMID_STRIDES if config.features == "fpn" else (16,)


def residual_network(config: BackboneConfig) -> resnet.ResNet:
    """The whole classification network, of which a backbone uses the stages it needs."""
    dilate = config.features == "c5"
    network: resnet.ResNet = getattr(resnet, config.name)(
        norm_layer=norm_layer(config.norm, config.norm_eps),
        replace_stride_with_dilation=[False, False, dilate],
    )
    if dilate:
        # torchvision leaves the first block as it was; the reference implementations do not.
        network.layer4[0].conv2.dilation = network.layer4[0].conv2.padding = (2, 2)
    if config.stride_in_1x1:
        for block in network.modules():
            if isinstance(block, resnet.Bottleneck):
                block.conv1.stride, block.conv2.stride = block.conv2.stride, (1, 1)
    return network


class Backbone(nn.Module):
    """From [B, 3, H, W] to the maps that the heads see.

    With a pyramid five maps of `fpn_channels` at strides 4, 8, 16, 32, 64, else one of stride 16.

    Attributes:
        out_channels: channels of every map.
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        network = residual_network(config)
        # The stages double in width, and the last is as wide as `inplanes`.
        widths = {f"layer{i}": network.inplanes * 2**i // 16 for i in range(1, 5)}
        last = _LAST_STAGES[config.features]
        self.body = IntermediateLayerGetter(network, {name: name for name in last})
        self.fpn: FeaturePyramidNetwork | None = None
        self.out_channels = widths[last[-1]]
        if config.features == "fpn":
            self.out_channels = config.fpn_channels
            self.fpn = FeaturePyramidNetwork(
                list(widths.values()),
                config.fpn_channels,
                extra_blocks=LastLevelMaxPool(),
                norm_layer=norm_layer(config.fpn_norm),
            )
        self._frozen: list[nn.Module] = []
        self.freeze(config.frozen_stages)

    def freeze(self, stages: int = len(_STAGES)) -> None:
        """Train so many stages, counted from the stem, no more; their statistics stay too."""
        names = [name for stage in _STAGES[:stages] for name in stage if name in self.body]
        self._frozen = [self.body[name].requires_grad_(False) for name in names]
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode; frozen stages remain in evaluation mode."""
        super().train(mode)
        for module in self._frozen:
            module.eval()
        return self

    def forward(self, images: Tensor) -> list[Tensor]:
        """Maps of normalised images, finest first."""
        maps = self.body(images)
        return list((maps if self.fpn is None else self.fpn(maps)).values())
