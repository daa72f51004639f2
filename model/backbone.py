"""ResNets and feature pyramids, with torchvision's parameter names."""

from collections.abc import Callable
from functools import partial
from typing import Literal, Self

from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import ops
from torchvision.models import resnet
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

from .config.schema import PYRAMID_STRIDES, BackboneConfig

Norm = Literal["none", "frozen_bn", "bn", "gn"]

_STAGES = (("conv1", "bn1"), ("layer1",), ("layer2",), ("layer3",), ("layer4",))
_LAST_STAGES = {
    "fpn": ("layer1", "layer2", "layer3", "layer4"),
    "c4": ("layer3",),
    "c5": ("layer4",),
}


class FrozenBatchNorm2d(ops.FrozenBatchNorm2d):  # type: ignore[misc]
    """Batch norm with constant weights and statistics, for feature maps [B, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise feature maps `x` [B, C, H, W]. The result has the dtype of `x`."""
        weight, bias, mean, variance = (
            values.reshape(1, -1, 1, 1)
            for values in (self.weight, self.bias, self.running_mean, self.running_var)
        )
        scale = weight * (variance + self.eps).rsqrt()
        # torchvision's module does not convert scale and shift to the dtype of `x`. Under autocast,
        # its result is float32, which takes twice the memory and time of a 16-bit result.
        normalised: Tensor = x * scale.to(x.dtype) + (bias - mean * scale).to(x.dtype)
        return normalised


class FeaturePyramid(FeaturePyramidNetwork):  # type: ignore[misc]
    """torchvision's feature pyramid (Lin et al., 2017), with faster upsampling in training."""

    def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the pyramid's feature maps by name, finest first.

        Args:
            x: feature maps of the ResNet by name, finest first.
        """
        inputs = list(x.values())
        inner = self.get_result_from_inner_blocks(inputs[-1], -1)
        maps = [self.get_result_from_layer_blocks(inner, -1)]
        for index in reversed(range(len(inputs) - 1)):
            inner = self.merge(inputs[index], inner, index)
            maps.insert(0, self.get_result_from_layer_blocks(inner, index))
        assert self.extra_blocks is not None
        outputs, names = self.extra_blocks(maps, inputs, list(x))
        return dict(zip(names, outputs, strict=True))

    def merge(self, features: Tensor, coarse: Tensor, index: int) -> Tensor:
        """Return a pyramid level [B, C, H, W] before its output convolution.

        It is the sum of the lateral convolution of `features` and the upsampled `coarse`.

        Args:
            features: ResNet map [B, N, H, W] for this level.
            coarse: next coarser pyramid level [B, C, h, w] before its output convolution. Its
                height and width are about half of those of `features`.
            index: index of the level; 0 is the finest.
        """
        fine: Tensor = self.get_result_from_inner_blocks(features, index)
        batch, channels, height, width = coarse.shape
        if not self.training or fine.shape[2:] != (2 * height, 2 * width):
            return fine + F.interpolate(coarse, size=fine.shape[2:], mode="nearest")
        # Upsample by broadcasting, whose gradient is a sum. The gradient of `interpolate` compiles
        # to a scatter with atomic additions, which takes 2 ms of a training step of 8 images of
        # 800x1344 on an H100.
        blocks = fine.view(batch, channels, height, 2, width, 2) + coarse[:, :, :, None, :, None]
        return blocks.view(fine.shape)


def norm_layer(norm: Norm, eps: float = 1e-5) -> Callable[[int], nn.Module] | None:
    """Return a function that builds a normalisation layer, given the number of channels.

    Return None if `norm` is "none". `eps` is the epsilon that the layer adds to the variance.
    """
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
    """Build torchvision's ResNet classifier with the norms, strides and dilation of `config`.

    The classifier has all stages. The backbone and the C4 head each use some of them.
    """
    dilate = config.features == "c5"
    build = partial(resnet.ResNet, resnet.BasicBlock, [1, 1, 1, 1])
    if config.name != "resnet10":  # torchvision has no function `resnet10`
        build = getattr(resnet, config.name)
    network: resnet.ResNet = build(
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
    """ResNet with an optional feature pyramid. Computes feature maps of images [B, 3, H, W].

    With a pyramid, there are five maps of strides 4 to 64. Without it, there is one map of stride
    16.

    Attributes:
        out_channels: number of channels of each map.
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        network = build_resnet(config)
        # The width doubles from stage to stage, up to `inplanes` channels in the last stage.
        widths = {f"layer{i}": network.inplanes * 2**i // 16 for i in range(1, 5)}
        last = _LAST_STAGES[config.features]
        self.body = IntermediateLayerGetter(network, {name: name for name in last})
        self.fpn: FeaturePyramid | None = None
        self.out_channels = widths[last[-1]]
        if config.features == "fpn":
            self.out_channels = config.fpn_channels
            self.fpn = FeaturePyramid(
                list(widths.values()),
                config.fpn_channels,
                extra_blocks=LastLevelMaxPool(),
                norm_layer=norm_layer(config.fpn_norm),
            )
        self._frozen: list[nn.Module] = []
        self.freeze(config.frozen_stages)

    def freeze(self, stages: int = len(_STAGES)) -> None:
        """Freeze weights and batch-norm statistics of the first `stages` stages of the ResNet.

        The stem is the first stage, `layer1` the second.
        """
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
        """Return the backbone's maps of normalised images [B, 3, H, W], finest first."""
        return self.last_stage(self.first_stages(self.stem(images)))

    def stem(self, images: Tensor) -> Tensor:
        """Return the output [B, C, H / 4, W / 4] of the ResNet's stem for normalised images."""
        body = self.body
        stem: Tensor = body.maxpool(body.relu(body.bn1(body.conv1(images))))
        return stem

    def first_stages(self, features: Tensor) -> list[Tensor]:
        """Return the maps of the ResNet's stages before `layer4`, finest first.

        Without a pyramid, only the map of `layer3` is returned. `features` is the output of `stem`.
        """
        maps = []
        for name in ("layer1", "layer2", "layer3"):
            features = self.body[name](features)
            maps.append(features)
        return maps if self.fpn is not None else maps[-1:]

    def last_stage(self, maps: list[Tensor]) -> list[Tensor]:
        """Apply `layer4` and the pyramid, if present. Return the backbone's maps, finest first.

        `maps` is the output of `first_stages`.
        """
        if "layer4" not in self.body:
            return maps
        deepest = self.body["layer4"](maps[-1])
        if self.fpn is None:
            return [deepest]
        by_name = dict(zip(self.body.return_layers, [*maps, deepest], strict=True))
        return list(self.fpn(by_name).values())
