"""Compilation and launch of `resize_pad.cu`."""

from ..compilation import Kernel, Launch

_BLOCK_WIDTH, _BLOCK_HEIGHT = 32, 8


def resize_pad_kernel() -> Kernel:
    """The only kernel there is."""
    return Kernel("resize_pad.cu", "resize_pad", (("CHANNELS", 3),), fused_multiply_add=True)


def resize_pad_launch(images: int, height: int, width: int) -> Launch:
    """Launch for a table [B, 8] int64.

    A row of it holds an image's address, its strides by channel, row and column, its height and
    width, and those that it is resized to. The output is [B, 3, height, width] uint8.
    """
    grid = (
        (width + _BLOCK_WIDTH - 1) // _BLOCK_WIDTH,
        (height + _BLOCK_HEIGHT - 1) // _BLOCK_HEIGHT,
        images,
    )
    return Launch(grid, (_BLOCK_WIDTH, _BLOCK_HEIGHT, 1), (height, width))


VARIANTS = (resize_pad_kernel(),)
