"""ResNets and feature pyramids, with torchvision's parameter names."""

from collections.abc import Callable
from functools import partial
from typing import Literal, Self

from torch import Tensor, nn
from torchvision.models import resnet
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.ops import FrozenBatchNorm2d
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

from .config.schema import PYRAMID_STRIDES, BackboneConfig

Norm = Literal["none", "frozen_bn", "bn", "gn"]

_STAGES = (("conv1", "bn1"), ("layer1",), ("layer2",), ("layer3",), ("layer4",))
_LAST_STAGES = {
    "fpn": ("layer1", "layer2", "layer3", "layer4"),
    "c4": ("layer3",),
    "c5": ("layer4",),
}


def norm_layer(norm: Norm, eps: float = 1e-5) -> Callable[[int], nn.Module] | None:
    """Return a function that builds a normalisation layer for a number of channels."""
    kinds: dict[Norm, Callable[[int], nn.Module] | None] = {
        "none": None,
        "frozen_bn": partial(FrozenBatchNorm2d, eps=eps),
        "bn": partial(nn.BatchNorm2d, eps=eps),
        "gn": partial(nn.GroupNorm, 32, eps=eps),
    }
    return kinds[norm]


def feature_strides(config: BackboneConfig) -> tuple[int, ...]:
    """Return the strides of the backbone's maps in input pixels, finest first."""
    return PYRAMID_STRIDES if config.features == "fpn" else (16,)


def build_resnet(config: BackboneConfig) -> resnet.ResNet:
    """Build torchvision's ResNet classifier; a backbone uses some of its stages."""
    dilate = config.features == "c5"
    network: resnet.ResNet = getattr(resnet, config.name)(
        norm_layer=norm_layer(config.norm, config.norm_eps),
        replace_stride_with_dilation=[False, False, dilate],
    )
    if dilate:
        # torchvision does not dilate the first block; the reference implementations do.
        network.layer4[0].conv2.dilation = network.layer4[0].conv2.padding = (2, 2)
    if config.stride_in_1x1:
        for block in network.modules():
            if isinstance(block, resnet.Bottleneck):
                block.conv1.stride, block.conv2.stride = block.conv2.stride, (1, 1)
    return network


class Backbone(nn.Module):
    """ResNet, with or without feature pyramid: computes feature maps of images [B, 3, H, W].

    With a pyramid, there are five maps of strides 4 to 64, otherwise one of stride 16.

    Attributes:
        out_channels: channels of every map.
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        network = build_resnet(config)
        # The width doubles from stage to stage; that of the last stage is `inplanes`.
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
        """Freeze weights and statistics of the first `stages` stages, counted from the stem."""
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
        """Return the feature maps of normalised images, finest first."""
        maps = self.body(images)
        return list((maps if self.fpn is None else self.fpn(maps)).values())
