"""Triton kernel of `maskrcnn::block_transition`: matrix products over the same pixels."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import language as tl
from triton.runtime.errors import OutOfResources

from .libraries import UnsupportedError
from .pointwise_kernel import descriptor


class Blocks(NamedTuple):
    """Launch parameters of the Triton kernel of `block_transition`."""

    # Number of rows and columns of pixels that a thread block computes.
    rows: int
    columns: int
    # Number of channels of the residual block's output that a thread block computes at a time.
    channels: int
    warps: int
    # Pipeline stages: number of groups of `channels` whose inputs are in shared memory at once.
    stages: int
    # Pipeline stages of the loop over the inputs of the middle convolution. 0: it has none.
    middle_stages: int = 0


# Number of input channels that the middle convolution multiplies at a time.
_BLOCK_K = 64


def fastest_blocks(tensors: Mapping[str, Tensor]) -> tuple[Blocks, ...]:
    """Return candidate launch parameters, among which the caller chooses by measurement.

    The number of pixels decides which candidate is the fastest. The candidates were found for an
    R-50-FPN on an H200. `tensors` are the inputs of `launch_block_transition`.
    """
    reduced = len(tensors["next_weight"])
    if "middle_weight" in tensors:
        if tensors["images"].shape[3] > 64:
            many = Blocks(8, 8, 32, 4, 3, 3) if reduced <= 128 else Blocks(4, 32, 64, 8, 3, 4)
            return many, Blocks(8, 8, 64, 4, 3, 3)
        if reduced <= 64:
            return Blocks(8, 16, 64, 4, 3, 4), Blocks(8, 8, 64, 4, 3, 3)
        return Blocks(8, 16, 32, 4, 3, 3), Blocks(8, 8, 64, 4, 2, 3)
    if "shortcut_weight" in tensors:
        return Blocks(1, 128, 64, 4, 2), Blocks(1, 64, 32, 4, 2)
    if reduced <= 64:
        return (Blocks(1, 128, 64, 4, 3),)
    if reduced > 128:
        return (Blocks(1, 128, 64, 8, 3),)
    if tensors["images"].shape[3] <= 64:
        return (Blocks(1, 128, 32, 4, 4),)
    return Blocks(1, 128, 32, 4, 3), Blocks(1, 128, 64, 4, 3)


def launch_block_transition(tensors: Mapping[str, Tensor], blocks: Blocks) -> None:
    """Queue the Triton kernel of `block_transition`.

    Args:
        tensors: inputs and outputs, contiguous and 16-byte aligned, by name. Inputs are named as
            the arguments of `block_transition`. The two results are written to `output` and
            `reduced`. Feature maps are [B, H, W, C], or [1, 1, B * H * W, C] without a middle
            convolution. Weights are [output channels, input channels], and that of the middle
            convolution [C, 9 * C].
        blocks: launch parameters.

    Raises:
        UnsupportedError: the GPU has too little shared memory for `blocks`.
    """
    has_shortcut_weight, has_middle = (
        f"{name}_weight" in tensors for name in ("shortcut", "middle")
    )
    batch, height, width, channels = tensors["images"].shape
    reduced, outputs = tensors["next_weight"].shape
    tile = (1, blocks.rows, blocks.columns)
    # For each tensor, the sizes of the part that the kernel reads or writes at once. -1: all.
    shapes = {
        "images": (*tile, _BLOCK_K if has_middle else -1),
        "weight": (blocks.channels, -1),
        "shortcut": (*tile, -1 if has_shortcut_weight else blocks.channels),
        "shortcut_weight": (blocks.channels, -1),
        "next_weight": (-1, blocks.channels),
        "middle_weight": (-1, _BLOCK_K),
        "output": (*tile, blocks.channels),
        "reduced": (*tile, -1),
    }
    missing = dict.fromkeys(("shortcut_weight", "shortcut_bias", "middle_weight", "middle_bias"))
    arguments: dict[str, Any] = {**missing, **tensors}
    for name in shapes.keys() & tensors.keys():
        sides = zip(shapes[name], tensors[name].shape, strict=True)
        block = [size if own < 0 else own for own, size in sides]
        arguments[name] = descriptor(tensors[name], block)
    grid = triton.cdiv(width, blocks.columns), triton.cdiv(height, blocks.rows), batch
    try:
        _block_transition[grid](
            **arguments,
            CHANNELS=channels,
            OUTPUTS=outputs,
            REDUCED=reduced,
            ROWS=blocks.rows,
            COLUMNS=blocks.columns,
            BLOCK_N=blocks.channels,
            BLOCK_K=_BLOCK_K,
            STAGES=blocks.stages,
            MIDDLE_STAGES=blocks.middle_stages,
            num_warps=blocks.warps,
        )
    except OutOfResources as error:
        raise UnsupportedError(str(error)) from error


@triton.jit  # type: ignore[untyped-decorator]
def _block_transition(  # type: ignore[no-untyped-def]
    images,
    weight,
    bias,
    shortcut,
    shortcut_weight,
    shortcut_bias,
    next_weight,
    next_bias,
    middle_weight,
    middle_bias,
    output,
    reduced,
    CHANNELS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    REDUCED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    MIDDLE_STAGES: tl.constexpr,
):
    """Compute the convolutions of `block_transition` as matrix products over the same pixels.

    A thread block computes both results for ROWS x COLUMNS pixels of an image, the first result in
    steps of BLOCK_N channels. The second product does not read the first result back from GPU
    memory. Matrices and maps are tensor descriptors: on GPUs of compute capability 9.0 or higher,
    the tensor memory accelerator (TMA) copies their blocks. It reads zeros for pixels outside of
    the map, and does not write these pixels.
    """
    PIXELS: tl.constexpr = ROWS * COLUMNS
    column, row, image = tl.program_id(0) * COLUMNS, tl.program_id(1) * ROWS, tl.program_id(2)
    if middle_weight is None:
        a = images.load([image, row, column, 0]).reshape(PIXELS, CHANNELS)
    else:
        middle = tl.zeros((PIXELS, CHANNELS), tl.float32)
        parts: tl.constexpr = CHANNELS // BLOCK_K
        for step in tl.range(0, 9 * parts, num_stages=MIDDLE_STAGES):
            tap, first = step // parts, step % parts * BLOCK_K
            shifted = images.load([image, row + tap // 3 - 1, column + tap % 3 - 1, first])
            own_weight = middle_weight.load([0, tap * CHANNELS + first])
            middle = tl.dot(shifted.reshape(PIXELS, BLOCK_K), own_weight.T, middle)
        middle += tl.load(middle_bias + tl.arange(0, CHANNELS))[None, :]
        a = tl.maximum(middle, 0.0).to(output.dtype)
    if shortcut_weight is not None:
        source = shortcut.load([image, row, column, 0])
        source = source.reshape(PIXELS, source.numel // PIXELS)
    total = tl.zeros((PIXELS, REDUCED), tl.float32)
    for start in tl.range(0, OUTPUTS, BLOCK_N, num_stages=STAGES):
        channel = start + tl.arange(0, BLOCK_N)
        offset = tl.load(bias + channel).to(tl.float32)
        expanded = tl.dot(a, weight.load([start, 0]).T)
        if shortcut_weight is not None:
            expanded = tl.dot(source, shortcut_weight.load([start, 0]).T, expanded)
            offset += tl.load(shortcut_bias + channel)
        else:
            expanded += shortcut.load([image, row, column, start]).reshape(PIXELS, BLOCK_N)
        expanded = tl.maximum(expanded + offset[None, :], 0.0).to(output.dtype)
        output.store([image, row, column, start], expanded.reshape(1, ROWS, COLUMNS, BLOCK_N))
        total = tl.dot(expanded, next_weight.load([0, start]).T, total)
    total += tl.load(next_bias + tl.arange(0, REDUCED))[None, :]
    total = tl.maximum(total, 0.0).to(reduced.dtype)
    reduced.store([image, row, column, 0], total.reshape(1, ROWS, COLUMNS, REDUCED))
