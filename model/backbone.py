"""Residual networks with a feature pyramid, under torchvision's parameter names."""

from collections.abc import Callable
from functools import partial

from torch import nn
from torchvision.models import resnet
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.ops import FrozenBatchNorm2d
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from .config import BackboneConfig

PYRAMID_SCALES = (1 / 4, 1 / 8, 1 / 16, 1 / 32)
"""Feature cells an input pixel of the levels that RoIs are pooled from."""

_NORMS: dict[str, Callable[[int], nn.Module]] = {
    "frozen_bn": FrozenBatchNorm2d,
    "bn": nn.BatchNorm2d,
    "gn": partial(nn.GroupNorm, 32),
}
_STAGES = (("conv1", "bn1"), ("layer1",), ("layer2",), ("layer3",), ("layer4",))


def build_backbone(config: BackboneConfig) -> BackboneWithFPN:
    """A network from [B, 3, H, W] to five maps of `fpn_channels` at strides 4, 8, 16, 32, 64.

    Normalisation other than frozen batch norm is used in the pyramid too, which trains from
    scratch; frozen batch norm leaves the pyramid without, as torchvision and detectron2 do.
    """
    norm = _NORMS[config.norm]
    body = getattr(resnet, config.name)(norm_layer=norm)
    for stage in _STAGES[: config.frozen_stages]:
        for name in stage:
            body.get_submodule(name).requires_grad_(False)
    width = body.inplanes // 8
    return BackboneWithFPN(
        body,
        return_layers={f"layer{i}": str(i - 1) for i in range(1, 5)},
        in_channels_list=[width * 2**i for i in range(4)],
        out_channels=config.fpn_channels,
        extra_blocks=LastLevelMaxPool(),
        norm_layer=None if config.norm == "frozen_bn" else norm,
    )
