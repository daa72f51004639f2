"""Precision of an exported model: half, with the parts that need it left in fp32."""

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torchvision.ops import FrozenBatchNorm2d

from ..model.mask_rcnn import MaskRCNN

_FOLLOWERS = {"conv1": "bn1", "conv2": "bn2", "conv3": "bn3", "0": "1"}


def fold_batch_norms(module: nn.Module) -> None:
    """Merge every batch norm, frozen or not, into the convolution before it, in place.

    Convolution and norm are found by torchvision's names: `conv1` and `bn1`, or the first two of a
    sequence.
    """
    for parent in module.modules():
        for conv_name, norm_name in _FOLLOWERS.items():
            conv, norm = getattr(parent, conv_name, None), getattr(parent, norm_name, None)
            if not isinstance(conv, nn.Conv2d):
                continue
            if not isinstance(norm, nn.BatchNorm2d | FrozenBatchNorm2d):
                continue
            statistics = norm.get_buffer("running_mean"), norm.get_buffer("running_var")
            affine = nn.Parameter(norm.weight), nn.Parameter(norm.bias)
            conv.weight, conv.bias = fuse_conv_bn_weights(
                conv.weight, conv.bias, *statistics, norm.eps, *affine
            )
            setattr(parent, norm_name, nn.Identity())


def halve(model: MaskRCNN, dtype: torch.dtype = torch.float16) -> None:
    """Make convolutions and linear layers compute in fp16 or bf16, in place.

    Anchors, box decoding, scores, suppression and the positions of RoIs stay in fp32: half
    precision has steps of half a pixel from 512 pixels on.
    """
    for part in (model.backbone, model.rpn.head, model.roi_heads):
        part.to(dtype)
