"""Fuse layers of a model, for training on a GPU."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.rpn import RPNHead
from torchvision.models.resnet import Bottleneck
from torchvision.ops import Conv2dNormActivation

from ..model.backbone import FeaturePyramid, FrozenBatchNorm2d
from ..model.mask_rcnn import MaskRCNN
from ..model.roi_heads import MaskPredictor
from ..plugins.class_logits import relu_class_logits
from ..plugins.fused_convolution import (
    convolution_relu,
    cudnn_convolution,
    pointwise_convolution,
)
from ..plugins.resnet_stem import arranged_weight, resnet_stem
from ..plugins.runtime.arguments import HALF_TYPES

# Types of the layers of a `Conv2dNormActivation` that has no norm.
_WITHOUT_NORM: tuple[list[type[nn.Module]], ...] = [nn.Conv2d], [nn.Conv2d, nn.ReLU]


def fuse_layers(model: MaskRCNN) -> None:
    """Fuse layers of a model in place.

    Frozen batch norms, shortcuts and ReLUs are computed together with the convolution before them.
    One convolution computes the RPN's logits and deltas. In the mask predictor, one operation
    computes the ReLU and the mask logits. Fusion saves memory traffic on a GPU. Parameters and
    their names stay the same. Results differ by rounding only.
    """
    for module in model.modules():
        if isinstance(module, Bottleneck) and isinstance(module.bn1, FrozenBatchNorm2d):
            _replace(module, "forward", _bottleneck)
        elif isinstance(module, Conv2dNormActivation) and _kinds(module) in _WITHOUT_NORM:
            _replace(module, "forward", _convolution_with_bias)
    body = model.backbone.body
    if isinstance(body.bn1, FrozenBatchNorm2d) and not body.conv1.weight.requires_grad:
        _replace(model, "stem", _stem)
    pyramid = model.backbone.fpn
    if pyramid is not None and all(_kinds(x) == [nn.Conv2d] for x in pyramid.inner_blocks):
        _replace(pyramid, "merge", _merge)
    _replace(model.rpn.head, "forward", _rpn_head)
    _replace(model.roi_heads.mask_predictor, "forward", _mask_predictor)


def _replace(module: nn.Module, name: str, fused: Callable[..., Any]) -> None:
    """Replace the method `name` of a module by `fused`, whose first argument is the module."""
    setattr(module, name, partial(fused, module))


def _dtype_of(layer: nn.Conv2d) -> torch.dtype:
    """Return the dtype of a layer's computation: autocast's if enabled, else the weight's."""
    device = layer.weight.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return layer.weight.dtype


def _kinds(module: nn.Sequential) -> list[type[nn.Module]]:
    return [type(layer) for layer in module]


def _stem(model: MaskRCNN, images: Tensor, image_sizes: Tensor) -> Tensor:
    body = model.backbone.body
    dtype = _dtype_of(body.conv1)
    if dtype not in HALF_TYPES:
        return MaskRCNN.stem(model, images, image_sizes)
    weight, bias = (x.detach() for x in _folded(body.conv1, body.bn1))
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


def _convolution_with_bias(layer: Conv2dNormActivation, features: Tensor) -> Tensor:
    return _convolution(features, layer[0], relu=len(layer) > 1)


def _merge(pyramid: FeaturePyramid, features: Tensor, coarse: Tensor, index: int) -> Tensor:
    if features.shape[2:] != (2 * coarse.shape[2], 2 * coarse.shape[3]):
        return FeaturePyramid.merge(pyramid, features, coarse, index)
    lateral = pyramid.inner_blocks[index][0]
    return _convolution(features, lateral, residual=coarse, relu=False)


def _rpn_head(head: RPNHead, features: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    parts = head.cls_logits, head.bbox_pred
    dtype = _dtype_of(head.cls_logits)
    weight, bias = (
        torch.cat([getattr(part, name) for part in parts]).to(dtype) for name in ("weight", "bias")
    )
    outputs = [
        pointwise_convolution(head.conv(feature), weight, bias, None, 1, False)
        for feature in features
    ]
    counts = [part.out_channels for part in parts]
    logits, deltas = zip(*(x.split(counts, dim=1) for x in outputs), strict=True)
    return list(logits), list(deltas)


def _mask_predictor(predictor: MaskPredictor, features: Tensor, labels: Tensor) -> Tensor:
    # The transposed convolution writes a separate block of 2 x 2 pixels for each cell of
    # `features`, so it is computed as a matrix product. This product is ordered by cell. Only the
    # final logits are rearranged into the order of the pixels.
    upsampling, last = predictor.conv5_mask, predictor.mask_fcn_logits
    assert upsampling.bias is not None
    assert last.bias is not None
    kernel = upsampling.weight.permute(2, 3, 1, 0).flatten(0, 2)
    cells = F.linear(features.permute(0, 2, 3, 1), kernel)
    pixels = torch.unflatten(cells, 3, (-1, len(upsampling.bias))).flatten(1, 3)
    offset, weight, bias = (
        x.to(cells.dtype) for x in (upsampling.bias, last.weight.flatten(1), last.bias)
    )
    logits: Tensor = relu_class_logits(pixels, offset, weight, bias, labels)
    by_cell = logits.view(*cells.shape[:3], *upsampling.kernel_size)
    return by_cell.transpose(2, 3).flatten(3).flatten(1, 2)


def _convolution(
    features: Tensor,
    conv: nn.Conv2d,
    norm: FrozenBatchNorm2d | None = None,
    residual: Tensor | None = None,
    relu: bool = True,
) -> Tensor:
    dtype = _dtype_of(conv)
    if norm is None:
        assert conv.bias is not None
        weight, bias = conv.weight, conv.bias
    else:
        weight, bias = _folded(conv, norm)
    images, kernel, offset = (x.to(dtype) for x in (features, weight, bias))
    window = [list(x) for x in (conv.stride, conv.padding, conv.dilation)]
    output: Tensor
    if conv.kernel_size == (1, 1) and (residual is not None or not relu):
        output = pointwise_convolution(images, kernel, offset, residual, conv.stride[0], relu)
    elif relu:
        output = convolution_relu(images, kernel, offset, residual, *window)
    else:
        output = cudnn_convolution(images, kernel, offset, *window, False)
    return output


def _folded(conv: nn.Conv2d, norm: FrozenBatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a convolution with its frozen batch norm folded into them."""
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    return conv.weight * scale[:, None, None, None], norm.bias - norm.running_mean * scale
