"""Triton kernels of the 1x1 convolutions in `operation.py`: matrix products over all pixels."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton
from triton import language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..runtime.arguments import aligned, check_argument
from ..runtime.launching import shared_memory_limit

# Launch parameters that were fastest, or as fast as others, for the 1x1 convolutions of R-50-FPN on
# an H100: `_DEEP` for many input channels, `_SHALLOW` for few, `_NARROW` for few output channels.
_DEEP: dict[str, Any] = {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3}
_SHALLOW: dict[str, Any] = {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 4, "num_stages": 3}
_NARROW: dict[str, Any] = {"BLOCK_M": 128, "BLOCK_N": 16, "num_warps": 4, "num_stages": 4}
_BLOCK_K = 64
# Launch parameters of `_upsampling_convolution`, and the maximum number of input channels for which
# a thread block's rows of the weight fit into shared memory.
_RESIDENT: dict[str, Any] = {"SIDE": 8, "BLOCK_N": 64, "num_warps": 4}
_RESIDENT_CHANNELS = 256
# Number of thread blocks per multiprocessor, and bytes of shared memory that each of them needs for
# `_RESIDENT_CHANNELS` input channels.
_RESIDENT_BLOCKS = 2
_RESIDENT_BYTES = 110_624
# Maximum number of input channels for which `_SHALLOW` is used.
_SHALLOW_CHANNELS = 128


def launch_pointwise_convolution(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    output: Tensor,
    stride: int,
    relu: bool,
) -> None:
    """Queue the Triton kernel of `pointwise_convolution`.

    The kernel writes its result to `output`, which must be channels-last. The other arguments are
    those of `pointwise_convolution`.
    """
    batch, channels, height, width = images.shape
    outputs, rows, columns = output.shape[1:]
    images = images.contiguous(memory_format=torch.channels_last)
    shift = 0
    if residual is not None:
        residual = residual.contiguous(memory_format=torch.channels_last)
        shift = int(residual.shape[2] != rows)
    shallow = channels <= _SHALLOW_CHANNELS
    blocks = _NARROW if outputs <= 16 else _SHALLOW if shallow else _DEEP
    grid = (
        triton.cdiv(batch * rows * columns, blocks["BLOCK_M"])
        * triton.cdiv(outputs, blocks["BLOCK_N"]),
    )
    wrap_triton(_pointwise_convolution)[grid](
        images,
        weight,
        bias,
        images if residual is None else residual,
        output,
        batch * rows * columns,
        OUTPUTS=outputs,
        CHANNELS=channels,
        ROWS=rows,
        COLUMNS=columns,
        HEIGHT=height,
        WIDTH=width,
        STRIDE=stride,
        RESIDUAL=residual is not None,
        SHIFT=shift,
        EARLY=shallow,
        RELU=relu,
        BLOCK_K=_BLOCK_K,
        **blocks,
    )


def can_keep_weight(images: Tensor, outputs: int) -> bool:
    """Return whether `launch_upsampling_convolution` supports `images` [B, C, H, W].

    It supports certain numbers of input and output channels, and needs a GPU with enough shared
    memory. `outputs` is the number of output channels.
    """
    channels = images.shape[1]
    power = channels & (channels - 1) == 0
    suits = 64 <= channels <= _RESIDENT_CHANNELS and outputs % _RESIDENT["BLOCK_N"] == 0
    if not (images.is_cuda and power and suits):
        return False
    return shared_memory_limit(images.device) >= _RESIDENT_BLOCKS * _RESIDENT_BYTES


def launch_upsampling_convolution(
    images: Tensor, weight: Tensor, bias: Tensor, coarse: Tensor, output: Tensor
) -> None:
    """Queue the Triton kernel of `upsampling_convolution`.

    The kernel writes its result to `output`, which must be channels-last. The other arguments are
    those of `upsampling_convolution`. `can_keep_weight` must be true.

    Raises:
        ValueError: an argument has another dtype or shape than `upsampling_convolution` documents.
    """
    batch, outputs, rows, columns = output.shape
    channels, side, block = images.shape[1], _RESIDENT["SIDE"], _RESIDENT["BLOCK_N"]
    shapes = {
        "images": (batch, channels, rows, columns),
        "weight": (outputs, channels, 1, 1),
        "bias": (outputs,),
        "coarse": (batch, outputs, rows // 2, columns // 2),
    }
    tensors = images, weight, bias, coarse
    for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
        check_argument(name, tensor, output.dtype, shape)
    images, coarse = (aligned(tensor.permute(0, 2, 3, 1)) for tensor in (images, coarse))
    parts = outputs // block
    multiprocessors = torch.cuda.get_device_properties(images.device).multi_processor_count
    blocks = max(1, _RESIDENT_BLOCKS * multiprocessors // parts)
    tiles = triton.cdiv(rows, side), triton.cdiv(columns, side)
    _upsampling_convolution[(blocks * parts,)](
        descriptor(images, (1, side, side, channels)),
        descriptor(aligned(weight.flatten(1)), (block, channels)),
        bias.contiguous(),
        descriptor(coarse, (1, side // 2, side // 2, block)),
        descriptor(output.permute(0, 2, 3, 1), (1, side, side, block)),
        batch * tiles[0] * tiles[1],
        TILE_ROWS=tiles[0],
        TILE_COLUMNS=tiles[1],
        CHANNELS=channels,
        OUTPUTS=outputs,
        BLOCKS=blocks,
        **_RESIDENT,
    )


def descriptor(tensor: Tensor, block: Sequence[int]) -> TensorDescriptor:
    """Return the Triton descriptor by which a kernel reads or writes whole blocks of a tensor.

    `tensor` is contiguous and 16-byte aligned. `block` is the shape of a block.
    """
    # The two views replace the strides of dimensions of size 1, which can be unaligned.
    return TensorDescriptor.from_tensor(tensor.view(-1).view(tensor.shape), list(block))


@triton.jit(do_not_specialize=["tiles"])  # type: ignore[untyped-decorator]
def _upsampling_convolution(  # type: ignore[no-untyped-def]
    images,
    weight,
    bias,
    coarse,
    output,
    tiles,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    CHANNELS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute a 1x1 convolution, and add a map that is upsampled by a factor of two.

    A thread block keeps BLOCK_N rows of the weight, one per output channel, in shared memory while
    it computes many tiles of SIDE x SIDE pixels. BLOCKS thread blocks keep the same rows, and each
    of them computes a part of the tiles. An image has TILE_ROWS x TILE_COLUMNS tiles. All maps are
    tensor descriptors: the tensor memory accelerator (TMA) copies their blocks, and does not copy
    pixels outside of a map.
    """
    HALF: tl.constexpr = SIDE // 2
    parts: tl.constexpr = OUTPUTS // BLOCK_N
    channel = tl.program_id(0) % parts * BLOCK_N
    b = weight.load([channel, 0]).T
    offset = tl.load(bias + channel + tl.arange(0, BLOCK_N))[None, :]
    for tile in tl.range(tl.program_id(0) // parts, tiles, BLOCKS, num_stages=3):
        column = tile % TILE_COLUMNS * SIDE
        row = tile // TILE_COLUMNS % TILE_ROWS * SIDE
        image = tile // TILE_COLUMNS // TILE_ROWS
        a = images.load([image, row, column, 0]).reshape(SIDE * SIDE, CHANNELS)
        added = coarse.load([image, row // 2, column // 2, channel])
        added = added.reshape(HALF, 1, HALF, 1, BLOCK_N)
        added = tl.broadcast_to(added, (HALF, 2, HALF, 2, BLOCK_N)).reshape(SIDE * SIDE, BLOCK_N)
        total = (tl.dot(a, b) + added + offset).to(output.dtype)
        output.store([image, row, column, channel], total.reshape(1, SIDE, SIDE, BLOCK_N))


@triton.jit  # type: ignore[untyped-decorator]
def _pointwise_convolution(  # type: ignore[no-untyped-def]
    images,
    weight,
    bias,
    residual,
    output,
    pixels,
    OUTPUTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SHIFT: tl.constexpr,
    EARLY: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply pixels [pixels, CHANNELS] by the weight [OUTPUTS, CHANNELS].T, and add the bias.

    A thread block computes one tile of the result. If RESIDUAL, add the residual map. If SHIFT, the
    residual has half the output's height and width, and each of its pixels is added to 2x2 pixels.
    If EARLY, load the residual before the product is computed, otherwise afterwards.
    """
    tiles: tl.constexpr = tl.cdiv(OUTPUTS, BLOCK_N)
    # Blocks with neighbouring numbers read the same pixels, which are then in the cache.
    pixel = tl.program_id(0) // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    channel_out = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    channel_in = tl.arange(0, BLOCK_K)
    is_pixel = (pixel < pixels)[:, None]
    is_output = channel_out < OUTPUTS
    is_value = is_pixel & is_output[None, :]

    image, index = pixel // (ROWS * COLUMNS), pixel % (ROWS * COLUMNS)
    row, column = index // COLUMNS, index % COLUMNS
    coarse = pixel
    if SHIFT:
        coarse = (image * (ROWS // 2) + row // 2) * (COLUMNS // 2) + column // 2
    added_pointers = residual + coarse[:, None].to(tl.int64) * OUTPUTS + channel_out[None, :]
    # With many input channels, the product needs the registers, so the residual is loaded later.
    if RESIDUAL and EARLY:
        added = tl.load(added_pointers, mask=is_value, other=0.0)

    source = pixel
    if STRIDE > 1:
        source = (image * HEIGHT + row * STRIDE) * WIDTH + column * STRIDE
    pixel_pointers = images + source[:, None].to(tl.int64) * CHANNELS + channel_in[None, :]
    weight_pointers = weight + channel_out[None, :] * CHANNELS + channel_in[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, CHANNELS, BLOCK_K):
        is_input = channel_in < CHANNELS - start
        a = tl.load(pixel_pointers, mask=is_pixel & is_input[None, :], other=0.0)
        b = tl.load(weight_pointers, mask=is_output[None, :] & is_input[:, None], other=0.0)
        total = tl.dot(a, b, total)
        pixel_pointers += BLOCK_K
        weight_pointers += BLOCK_K

    total += tl.load(bias + channel_out, mask=is_output, other=0.0)[None, :]
    if RESIDUAL and EARLY:
        total += added
    elif RESIDUAL:
        total += tl.load(added_pointers, mask=is_value, other=0.0)
    if RELU:
        total = tl.maximum(total, 0.0)
    pointers = output + pixel[:, None].to(tl.int64) * OUTPUTS + channel_out[None, :]
    tl.store(pointers, total.to(output.dtype.element_ty), mask=is_value)
