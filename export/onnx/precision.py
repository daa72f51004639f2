"""Preparation of a model for export: folding of batch norms, and conversion to 16-bit types."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torchvision.ops import FrozenBatchNorm2d

from ...model.mask_rcnn import MaskRCNN

# Name of the batch norm after each convolution, in torchvision's blocks and in nn.Sequential.
_NORM_AFTER_CONV = {"conv1": "bn1", "conv2": "bn2", "conv3": "bn3", "0": "1"}


def fold_batch_norms(module: nn.Module) -> None:
    """Fold every batch norm, frozen or not, into the convolution before it, in place.

    A convolution and its batch norm are recognized by torchvision's names, such as `conv1` and
    `bn1`, or as the first two modules of an `nn.Sequential`.
    """
    for parent in module.modules():
        for conv_name, norm_name in _NORM_AFTER_CONV.items():
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


def halve(model: MaskRCNN, dtype: torch.dtype) -> None:
    """Convert convolutions and linear layers to fp16 or bf16, in place.

    Anchors, box decoding, scores, NMS and RoI coordinates stay in fp32.
    """
    # In fp16, coordinates from 512 pixels on would be rounded to steps of half a pixel.
    for part in (model.backbone, model.rpn.head, model.roi_heads):
        part.to(dtype)


class _Upsampling(nn.Module):
    """Transposed 2x2 convolution of stride 2, computed as a 1x1 convolution and a pixel shuffle."""

    def __init__(self, transposed: nn.ConvTranspose2d) -> None:
        super().__init__()
        assert transposed.stride == transposed.kernel_size == (2, 2)
        assert transposed.bias is not None
        self.conv = nn.Conv2d(transposed.in_channels, 4 * transposed.out_channels, 1)
        weight = transposed.weight.permute(1, 2, 3, 0).flatten(0, 2)
        self.conv.weight = nn.Parameter(weight[:, :, None, None])
        self.conv.bias = nn.Parameter(transposed.bias.repeat_interleave(4))

    def forward(self, features: Tensor) -> Tensor:
        """Return the upsampled features, [B, D, 2H, 2W] for an input of [B, C, H, W]."""
        return F.pixel_shuffle(self.conv(features), 2)


def replace_transposed_convolution(model: MaskRCNN) -> None:
    """Replace the mask head's transposed convolution by a 1x1 convolution with a pixel shuffle.

    The model is changed in place.
    """
    predictor = model.roi_heads.mask_predictor
    predictor.conv5_mask = _Upsampling(predictor.conv5_mask)  # type: ignore[assignment]
