"""`maskrcnn::resnet_stem`: normalisation, first convolution and max pooling of a ResNet.

Specification of all implementations: pixels are normalised in float32 and rounded to the weight's
dtype. Pixels of the padding become zero. As in torchvision's ResNets, the next steps are a 7x7
convolution of stride 2 with bias, a ReLU, and max pooling of 3x3 pixels with stride 2.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..runtime.arguments import HALF_TYPES, kernel_argument
from ..runtime.launching import launch_kernel
from .kernel import PixelType, resnet_stem_kernel, resnet_stem_launch

_CHANNELS, _KERNEL = 64, 7
# Lowest compute capability that has the tensor-core instructions of `resnet_stem.cu`, and the only
# one that has those of the faster `resnet_stem_sm90.cu`.
_CAPABILITY, _WARPGROUP_CAPABILITY = (8, 0), (9, 0)
# Sizes of the axes into which the padded weight [64, 4, 7, 8] is split: output channels (p, j, h),
# input channels (l, e), rows r and columns (s, g, k) of the convolution's kernel. `_ARRANGED` is
# the order of these axes in the result of `arranged_weight`.
_SPLIT = {"p": 4, "j": 2, "h": 8, "l": 2, "e": 2, "r": 7, "s": 2, "g": 2, "k": 2}
_ARRANGED = "rsphkljge"
_PIXEL_TYPES: dict[torch.dtype, PixelType] = {torch.uint8: "unsigned char", torch.float32: "float"}


def arranged_weight(weight: Tensor) -> Tensor:
    """Return a weight [64, 3, 7, 7] in the order in which the CUDA kernel reads it, [14, 4, 32, 8].

    The weight is padded with zeros to [64, 4, 7, 8]. The first axis counts the steps of the matrix
    product, two per row of the 7x7 window. Each step covers 4 pixels of a row with 4 channels. The
    second axis counts groups of 16 output channels. The last two axes are the threads of a warp,
    and the values that a thread reads.
    """
    padded = F.pad(weight, (0, 1, 0, 0, 0, 1)).reshape(tuple(_SPLIT.values()))
    names = list(_SPLIT)
    return padded.permute([names.index(name) for name in _ARRANGED]).reshape(14, 4, 32, 8)


def _weight_from_arranged(arranged: Tensor) -> Tensor:
    split = arranged.reshape([_SPLIT[name] for name in _ARRANGED])
    padded = split.permute([_ARRANGED.index(name) for name in _SPLIT]).reshape(64, 4, 7, 8)
    return padded[:, :3, :, :_KERNEL]


@torch.library.custom_op("maskrcnn::resnet_stem", mutates_args=(), device_types="cpu")
def resnet_stem(
    images: Tensor, image_sizes: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, std: Tensor
) -> Tensor:
    """Apply normalisation and a ResNet's first convolution, ReLU and max pooling.

    The operation has no gradient.

    Args:
        images: [B, 3, H, W] RGB in 0..255, uint8 or float32.
        image_sizes: [B, 2] int64, height and width in pixels before padding.
        weight: [14, 4, 32, 8], result of `arranged_weight`; on a GPU float16 or bfloat16.
        bias: [64] of the weight's dtype.
        mean: [3] float32, which is subtracted from the pixels.
        std: [3] float32, by which pixels are divided after the subtraction of the mean.

    Returns:
        [B, 64, H', W'] of the weight's dtype, channels-last; H' and W' are a quarter of H and W,
        rounded up.

    Raises:
        ValueError: on a GPU, an argument has another dtype or shape than documented.
    """
    return _separate_operations(images, image_sizes, weight, bias, mean, std)


@resnet_stem.register_fake
def _(
    images: Tensor, image_sizes: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, std: Tensor
) -> Tensor:
    return _empty_output(images, weight)


@resnet_stem.register_kernel("cuda")
def _(
    images: Tensor, image_sizes: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, std: Tensor
) -> Tensor:
    pixel_type, value_type = _PIXEL_TYPES.get(images.dtype), HALF_TYPES.get(weight.dtype)
    if pixel_type is None or value_type is None:
        raise ValueError(
            f"images must be uint8 or float32, not {images.dtype}, and the weight float16 or "
            f"bfloat16, not {weight.dtype}"
        )
    capability = torch.cuda.get_device_capability(images.device)
    if capability < _CAPABILITY:
        return _separate_operations(images, image_sizes, weight, bias, mean, std)
    batch, _, height, width = images.shape
    inputs = [
        kernel_argument("images", images, images.dtype, (-1, 3, -1, -1)),
        kernel_argument("image_sizes", image_sizes, torch.int64, (batch, 2)),
        kernel_argument("weight", weight, weight.dtype, (14, 4, 32, 8)),
        kernel_argument("bias", bias, weight.dtype, (_CHANNELS,)),
        kernel_argument("mean", mean, torch.float32, (3,)),
        kernel_argument("std", std, torch.float32, (3,)),
    ]
    output = _empty_output(images, weight)
    sm90 = capability == _WARPGROUP_CAPABILITY
    rows, columns = output.shape[2:]
    launch = resnet_stem_launch(batch, height, width, rows, columns, sm90)
    launch_kernel(resnet_stem_kernel(pixel_type, value_type, sm90), launch, inputs, [output])
    return output


def _separate_operations(
    images: Tensor, image_sizes: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, std: Tensor
) -> Tensor:
    height, width = image_sizes[:, :, None, None].unbind(dim=1)
    rows = torch.arange(images.shape[2], device=images.device)[:, None]
    columns = torch.arange(images.shape[3], device=images.device)
    inside = (rows < height[:, :, None]) & (columns < width[:, :, None])
    normalised = (images.float() - mean[:, None, None]) / std[:, None, None]
    pixels = torch.where(inside, normalised, 0).to(weight.dtype)
    hidden = F.conv2d(pixels, _weight_from_arranged(weight), bias, stride=2, padding=3).relu()
    pooled = F.max_pool2d(hidden, kernel_size=3, stride=2, padding=1)
    return pooled.contiguous(memory_format=torch.channels_last)


def _empty_output(images: Tensor, weight: Tensor) -> Tensor:
    batch, _, height, width = images.shape
    rows, columns = (height + 3) // 4, (width + 3) // 4
    return weight.new_empty(batch, rows, columns, _CHANNELS).permute(0, 3, 1, 2)
