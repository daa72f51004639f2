"""Compilation and launch of `block_transition.cu`."""

from ..runtime.compilation import Kernel, Launch

# Channels of a pixel that four threads read together, and pixels that a warp reads together.
CHUNK, _TILE = 32, 16
_WARP, _THREADS = 32, 512
# Maximum shared memory of a thread block on compute capability 9.0, in bytes.
_SHARED = 227 << 10


def fits_shared_memory(channels: int, shortcut: int, outputs: int, reduced: int) -> bool:
    """Return whether a thread block has enough shared memory for `block_transition`.

    The limit is that of compute capability 9.0.

    Args:
        channels: input channels of a residual block's last convolution.
        shortcut: input channels of the shortcut's convolution. 0: the shortcut has no convolution.
        outputs: output channels of the last convolution.
        reduced: output channels of the next block's first convolution.
    """
    return _shared_memory(channels, shortcut, outputs, reduced) <= _SHARED


def block_transition_kernel(
    value_type: str, channels: int, shortcut: int, outputs: int, reduced: int
) -> Kernel:
    """Return the kernel for the end of a residual block and the next block's first convolution.

    Args:
        value_type: type of all tensors, `float16` or `bfloat16`.
        channels: input channels of the residual block's last convolution.
        shortcut: input channels of the shortcut's 1x1 convolution. 0: the shortcut has no
            convolution; its feature map has `outputs` channels and is added unchanged.
        outputs: channels of the residual block's output.
        reduced: output channels of the next block's first convolution.
    """
    constants = (
        ("VALUE", value_type),
        ("CHANNELS", channels),
        ("SHORTCUT", shortcut),
        ("OUTPUTS", outputs),
        ("REDUCED", reduced),
        ("THREADS", _THREADS),
    )
    return Kernel(
        "block_transition/block_transition.cu",
        "block_transition",
        constants,
        fused_multiply_add=True,
        shared_memory=_shared_memory(channels, shortcut, outputs, reduced),
    )


def block_transition_launch(pixels: int, multiprocessors: int) -> Launch:
    """Return the grid, block and scalar arguments of `block_transition_kernel`.

    `pixels` is the number of pixels in a batch, `multiprocessors` the number of multiprocessors of
    the GPU. The kernel's inputs are, in this order:

    - input of the residual block's last convolution, [pixels, channels];
    - weight [outputs, channels] and bias [outputs] of this convolution;
    - input of the shortcut's convolution, [pixels, shortcut], or, without such a convolution, the
      map to add, [pixels, outputs];
    - weight [outputs, shortcut] and bias [outputs] of the shortcut's convolution, or two empty
      tensors;
    - weight [reduced, outputs] and bias [reduced] of the next block's first convolution.

    Outputs are the block's output [pixels, outputs] and the result of the next block's first
    convolution [pixels, reduced]. All tensors have the kernel's `value_type`.
    """
    blocks = -(-pixels // (_TILE * _THREADS // _WARP))
    return Launch((min(multiprocessors, blocks), 1, 1), (_THREADS, 1, 1), (pixels,))


def _shared_memory(channels: int, shortcut: int, outputs: int, reduced: int) -> int:
    """Return the shared memory that a thread block of `block_transition` needs, in bytes.

    It holds all weights, and the inputs of 16 pixels per warp. The arguments are the numbers of
    channels that `fits_shared_memory` explains.
    """
    weights = outputs * (channels + shortcut + reduced)
    pixels = _TILE * _THREADS // _WARP * (channels + (shortcut or outputs))
    return 2 * (weights + pixels)


PREBUILT_KERNELS = tuple(
    block_transition_kernel(value_type, 64, shortcut, 256, 64)
    for value_type in ("float16", "bfloat16")
    for shortcut in (64, 0)
)
