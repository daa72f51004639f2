"""Compilation and launch of `resize_pad.cu`."""

from ..runtime.compilation import Kernel, Launch

# Threads of a block, and neighbouring output rows that a thread computes.
_BLOCK_WIDTH, _BLOCK_HEIGHT = 32, 8
_ROWS = 4
_BLOCK_ROWS = _ROWS * _BLOCK_HEIGHT


RESIZE_PAD = Kernel(
    "resize_pad/resize_pad.cu",
    "resize_pad",
    (("CHANNELS", 3), ("ROWS", _ROWS)),
    fused_multiply_add=True,
)


def resize_pad_launch(images: int, height: int, width: int) -> Launch:
    """Return the grid, block and scalar arguments of the kernel `RESIZE_PAD`.

    The input is a table [images, 8] int64. A row holds the GPU address of a uint8 image, its
    strides in bytes by channel, row and column, its height and width, and its height and width
    after resizing. The output is the padded batch [images, 3, height, width] uint8.
    """
    grid = (
        (width + _BLOCK_WIDTH - 1) // _BLOCK_WIDTH,
        (height + _BLOCK_ROWS - 1) // _BLOCK_ROWS,
        images,
    )
    return Launch(grid, (_BLOCK_WIDTH, _BLOCK_HEIGHT, 1), (height, width))


PREBUILT_KERNELS = (RESIZE_PAD,)
