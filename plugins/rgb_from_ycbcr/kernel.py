"""Compilation and launch of `rgb_from_ycbcr.cu`."""

from ..runtime.compilation import Kernel, Launch

_BLOCK_WIDTH, _BLOCK_HEIGHT = 64, 4

RGB_FROM_YCBCR = Kernel("rgb_from_ycbcr/rgb_from_ycbcr.cu", "rgb_from_ycbcr", (("CHANNELS", 3),))


def rgb_from_ycbcr_launch(images: int, height: int, width: int) -> Launch:
    """Return the grid and block of the kernel `RGB_FROM_YCBCR`.

    The input is a table [images, 7] int64. A row holds three GPU addresses (of an image's luma
    plane, of its two adjacent chroma planes, and of its RGB output), then height and width of the
    image, then height and width of a chroma plane.

    Args:
        images: Number of rows of the table.
        height: Height of the tallest image in pixels.
        width: Width of the widest image in pixels.
    """
    grid = (
        (width + _BLOCK_WIDTH - 1) // _BLOCK_WIDTH,
        (height + _BLOCK_HEIGHT - 1) // _BLOCK_HEIGHT,
        images,
    )
    return Launch(grid, (_BLOCK_WIDTH, _BLOCK_HEIGHT, 1), ())


PREBUILT_KERNELS = (RGB_FROM_YCBCR,)
