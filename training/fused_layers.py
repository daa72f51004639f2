"""Fuse batch norms, shortcuts and ReLUs into convolutions, for training under autocast."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck
from torchvision.ops import Conv2dNormActivation

from ..model.backbone import FeaturePyramid, FrozenBatchNorm2d
from ..model.mask_rcnn import MaskRCNN
from ..plugins.fused_convolution import convolution_relu, pointwise_convolution
from ..plugins.resnet_stem import arranged_weight, resnet_stem


def fuse_layers(model: MaskRCNN) -> None:
    """Fuse frozen batch norms, shortcuts and ReLUs into the convolutions of a model, in place.

    Fusion saves memory traffic on a GPU. Parameters and their names stay the same. Under autocast,
    results differ by rounding only. Outside of autocast, the model computes as before.
    """
    for module in model.modules():
        if isinstance(module, Bottleneck) and isinstance(module.bn1, FrozenBatchNorm2d):
            _replace(module, "forward", _bottleneck)
        elif isinstance(module, Conv2dNormActivation) and _kinds(module) == [nn.Conv2d, nn.ReLU]:
            _replace(module, "forward", _activated_convolution)
    body = model.backbone.body
    if isinstance(body.bn1, FrozenBatchNorm2d) and not body.conv1.weight.requires_grad:
        _replace(model, "stem", _stem)
    pyramid = model.backbone.fpn
    if pyramid is not None and all(_kinds(x) == [nn.Conv2d] for x in pyramid.inner_blocks):
        _replace(pyramid, "merge", _merge)


def _replace(module: nn.Module, name: str, fused: Callable[..., Tensor]) -> None:
    """Replace the method `name` of a module by `fused`, but only for calls under autocast.

    The arguments of `fused` are the module and the arguments of the method.
    """
    original = getattr(module, name)

    def method(features: Tensor, *others: Any) -> Tensor:
        if torch.is_autocast_enabled(features.device.type):
            return fused(module, features, *others)
        result: Tensor = original(features, *others)
        return result

    setattr(module, name, method)


def _kinds(module: nn.Sequential) -> list[type[nn.Module]]:
    return [type(layer) for layer in module]


def _stem(model: MaskRCNN, images: Tensor, image_sizes: Tensor) -> Tensor:
    body = model.backbone.body
    weight, bias = (x.detach() for x in _folded(body.conv1, body.bn1))
    dtype = torch.get_autocast_dtype(images.device.type)
    mean, std = model.pixel_mean, model.pixel_std
    arranged = arranged_weight(weight.to(dtype))
    output: Tensor = resnet_stem(images, image_sizes, arranged, bias.to(dtype), mean, std)
    return output


def _bottleneck(block: Bottleneck, features: Tensor) -> Tensor:
    shortcut = features
    if block.downsample is not None:
        conv, norm = block.downsample
        shortcut = _convolution(features, conv, norm, relu=False)
    hidden = _convolution(features, block.conv1, block.bn1)
    hidden = _convolution(hidden, block.conv2, block.bn2)
    return _convolution(hidden, block.conv3, block.bn3, residual=shortcut)


def _activated_convolution(layer: Conv2dNormActivation, features: Tensor) -> Tensor:
    return _convolution(features, layer[0])


def _merge(pyramid: FeaturePyramid, features: Tensor, coarse: Tensor, index: int) -> Tensor:
    if features.shape[2:] != (2 * coarse.shape[2], 2 * coarse.shape[3]):
        return FeaturePyramid.merge(pyramid, features, coarse, index)
    lateral = pyramid.inner_blocks[index][0]
    return _convolution(features, lateral, residual=coarse, relu=False)


def _convolution(
    features: Tensor,
    conv: nn.Conv2d,
    norm: FrozenBatchNorm2d | None = None,
    residual: Tensor | None = None,
    relu: bool = True,
) -> Tensor:
    dtype = torch.get_autocast_dtype(features.device.type)
    if norm is None:
        assert conv.bias is not None
        weight, bias = conv.weight, conv.bias
    else:
        weight, bias = _folded(conv, norm)
    images, kernel, offset = (x.to(dtype) for x in (features, weight, bias))
    output: Tensor
    if conv.kernel_size == (1, 1) and (residual is not None or not relu):
        output = pointwise_convolution(images, kernel, offset, residual, conv.stride[0], relu)
    else:
        window = (list(x) for x in (conv.stride, conv.padding, conv.dilation))
        output = convolution_relu(images, kernel, offset, residual, *window)
    return output


def _folded(conv: nn.Conv2d, norm: FrozenBatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a convolution with its frozen batch norm folded into them."""
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    return conv.weight * scale[:, None, None, None], norm.bias - norm.running_mean * scale
