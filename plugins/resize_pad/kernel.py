"""Compilation and launch of `resize_pad.cu`."""

from ..runtime.compilation import Kernel, Launch

# Output pixels per block. Each thread computes one of them.
_BLOCK_WIDTH, _BLOCK_HEIGHT = 32, 8


RESIZE_PAD = Kernel(
    "resize_pad/resize_pad.cu", "resize_pad", (("CHANNELS", 3),), fused_multiply_add=True
)


def resize_pad_launch(images: int, height: int, width: int) -> Launch:
    """Return the grid, block and scalar arguments of the kernel `RESIZE_PAD`.

    The input is a table [images, 8] int64. A row holds an image's address, its strides in bytes by
    channel, row and column, its height and width, and its height and width after resizing. The
    output is the padded batch [images, 3, height, width] uint8.
    """
    grid = (
        (width + _BLOCK_WIDTH - 1) // _BLOCK_WIDTH,
        (height + _BLOCK_HEIGHT - 1) // _BLOCK_HEIGHT,
        images,
    )
    return Launch(grid, (_BLOCK_WIDTH, _BLOCK_HEIGHT, 1), (height, width))


PREBUILT_KERNELS = (RESIZE_PAD,)
