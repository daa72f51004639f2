"""Triton kernel of `maskrcnn::expand_reduce`: two matrix products over the same pixels."""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton
from triton import language as tl

# Launch parameters that were fastest for R-50-FPN on an H100: `_FEW` for up to 64 input channels,
# `_MANY` for more. A block handles BLOCK_M pixels. It computes the channels between the two
# convolutions in groups of BLOCK_N.
_FEW: dict[str, Any] = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
_MANY: dict[str, Any] = {"BLOCK_M": 128, "BLOCK_N": 32, "num_warps": 4, "num_stages": 3}


def launch_expand_reduce(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor,
    next_weight: Tensor,
    next_bias: Tensor,
    output: Tensor,
    reduced: Tensor,
) -> None:
    """Queue the Triton kernel of `expand_reduce`, which writes to `output` and `reduced`.

    `output` [B, N, H, W] and `reduced` [B, M, H, W] must be channels-last. The other arguments are
    those of `expand_reduce`.
    """
    batch, channels, rows, columns = images.shape
    images, residual = (x.contiguous(memory_format=torch.channels_last) for x in (images, residual))
    blocks = _FEW if channels <= 64 else _MANY
    pixels = batch * rows * columns
    wrap_triton(_expand_reduce)[(triton.cdiv(pixels, blocks["BLOCK_M"]),)](
        images,
        weight,
        bias,
        residual,
        next_weight,
        next_bias,
        output,
        reduced,
        pixels,
        CHANNELS=channels,
        OUTPUTS=output.shape[1],
        REDUCED=reduced.shape[1],
        **blocks,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _expand_reduce(  # type: ignore[no-untyped-def]
    images,
    weight,
    bias,
    residual,
    next_weight,
    next_bias,
    output,
    reduced,
    pixels,
    CHANNELS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    REDUCED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute both 1x1 convolutions of `expand_reduce` as matrix products over the pixels.

    All maps are [pixels, channels]. A thread block computes both results for BLOCK_M pixels, the
    first result in steps of BLOCK_N channels. The second product does not read the first result
    back from GPU memory.
    """
    pixel = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_pixel = (pixel < pixels)[:, None]
    pixel = pixel[:, None].to(tl.int64)
    channel_in = tl.arange(0, CHANNELS)
    channel_reduced = tl.arange(0, REDUCED)
    a = tl.load(images + pixel * CHANNELS + channel_in[None, :], mask=is_pixel, other=0.0)
    total = tl.zeros((BLOCK_M, REDUCED), tl.float32)
    for start in range(0, OUTPUTS, BLOCK_N):
        channel = start + tl.arange(0, BLOCK_N)
        place = pixel * OUTPUTS + channel[None, :]
        added = tl.load(residual + place, mask=is_pixel, other=0.0)
        b = tl.load(weight + channel[None, :] * CHANNELS + channel_in[:, None])
        c = tl.load(next_weight + channel_reduced[None, :] * OUTPUTS + channel[:, None])
        expanded = tl.dot(a, b) + tl.load(bias + channel)[None, :] + added
        expanded = tl.maximum(expanded, 0.0).to(output.dtype.element_ty)
        tl.store(output + place, expanded, mask=is_pixel)
        total = tl.dot(expanded, c, total)
    total = tl.maximum(total + tl.load(next_bias + channel_reduced)[None, :], 0.0)
    place = pixel * REDUCED + channel_reduced[None, :]
    tl.store(reduced + place, total.to(reduced.dtype.element_ty), mask=is_pixel)
