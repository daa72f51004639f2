"""Triton kernel of `maskrcnn::block_transition`: matrix products over the same pixels."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import language as tl
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from .libraries import UnsupportedError


class Blocks(NamedTuple):
    """Launch parameters of the Triton kernel."""

    # Number of pixels that a thread block computes.
    pixels: int
    # Number of channels of the residual block's output that a thread block computes at a time.
    channels: int
    warps: int
    # Pipeline stages: number of groups of `channels` whose inputs are in shared memory at once.
    stages: int


def fastest_blocks(matrices: Mapping[str, Tensor]) -> tuple[Blocks, ...]:
    """Return candidate launch parameters, among which the caller chooses by measurement.

    The number of pixels decides which candidate is the fastest. The candidates were found for an
    R-50-FPN on an H200. `matrices` are the inputs of `launch_block_transition`.
    """
    if "shortcut_weight" in matrices:
        return Blocks(128, 64, 4, 2), Blocks(64, 32, 4, 2)
    reduced = len(matrices["next_weight"])
    if reduced <= 64:
        return (Blocks(128, 64, 4, 3),)
    if reduced > 128:
        return (Blocks(128, 64, 8, 3),)
    if matrices["images"].shape[1] <= 64:
        return (Blocks(128, 32, 4, 4),)
    return Blocks(128, 32, 4, 3), Blocks(128, 64, 4, 3)


def launch_block_transition(matrices: Mapping[str, Tensor], blocks: Blocks) -> None:
    """Queue the Triton kernel of `block_transition`.

    Args:
        matrices: inputs and outputs, contiguous and 16-byte aligned, by name. Inputs are named as
            the arguments of `block_transition`. The results of the two convolutions are written to
            `output` and `reduced`. Feature maps are [pixels, channels], weights [output channels,
            input channels].
        blocks: launch parameters.

    Raises:
        UnsupportedError: the GPU has too little shared memory for `blocks`.
    """
    has_shortcut_weight = "shortcut_weight" in matrices
    reduced, outputs = matrices["next_weight"].shape
    # For each matrix, rows and columns that the kernel reads or writes at once. -1: all.
    shapes = {
        "images": (blocks.pixels, -1),
        "weight": (blocks.channels, -1),
        "shortcut": (blocks.pixels, -1 if has_shortcut_weight else blocks.channels),
        "shortcut_weight": (blocks.channels, -1),
        "next_weight": (-1, blocks.channels),
        "output": (blocks.pixels, blocks.channels),
        "reduced": (blocks.pixels, -1),
    }
    arguments: dict[str, Any] = {"shortcut_weight": None, "shortcut_bias": None, **matrices}
    for name in shapes.keys() & matrices.keys():
        sides = zip(shapes[name], matrices[name].shape, strict=True)
        block = [size if own < 0 else own for own, size in sides]
        arguments[name] = TensorDescriptor.from_tensor(matrices[name], block)
    try:
        _block_transition[(triton.cdiv(len(matrices["images"]), blocks.pixels),)](
            **arguments,
            OUTPUTS=outputs,
            REDUCED=reduced,
            BLOCK_M=blocks.pixels,
            BLOCK_N=blocks.channels,
            STAGES=blocks.stages,
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
    output,
    reduced,
    OUTPUTS: tl.constexpr,
    REDUCED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute the 1x1 convolutions of `block_transition` as matrix products over the pixels.

    A thread block computes both results for BLOCK_M pixels, the first result in steps of BLOCK_N
    channels. The second product does not read the first result back from GPU memory. Matrices are
    tensor descriptors: on GPUs of compute capability 9.0 or higher, the tensor memory accelerator
    (TMA) copies their blocks, and does not copy pixels beyond the last one.
    """
    pixel = tl.program_id(0) * BLOCK_M
    a = images.load([pixel, 0])
    if shortcut_weight is not None:
        source = shortcut.load([pixel, 0])
    total = tl.zeros((BLOCK_M, REDUCED), tl.float32)
    for start in tl.range(0, OUTPUTS, BLOCK_N, num_stages=STAGES):
        channel = start + tl.arange(0, BLOCK_N)
        offset = tl.load(bias + channel).to(tl.float32)
        expanded = tl.dot(a, weight.load([start, 0]).T)
        if shortcut_weight is not None:
            expanded = tl.dot(source, shortcut_weight.load([start, 0]).T, expanded)
            offset += tl.load(shortcut_bias + channel)
        else:
            expanded += shortcut.load([pixel, start])
        expanded = tl.maximum(expanded + offset[None, :], 0.0).to(output.dtype)
        output.store([pixel, start], expanded)
        total = tl.dot(expanded, next_weight.load([0, start]).T, total)
    total += tl.load(next_bias + tl.arange(0, REDUCED))[None, :]
    reduced.store([pixel, 0], tl.maximum(total, 0.0).to(reduced.dtype))
