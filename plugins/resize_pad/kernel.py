"""Compilation and launch of `resize_pad.cu`."""

from ..runtime.compilation import Kernel, Launch

# Width and height of a block in threads. Number of neighbouring output rows per thread.
_BLOCK_WIDTH, _BLOCK_HEIGHT = 32, 8
_ROWS = 4
_BLOCK_ROWS = _ROWS * _BLOCK_HEIGHT
# Threads of a block that computes weights.
_WEIGHT_THREADS = 128
# Entries of the table of weights before the weights: index of the first source pixel, and number of
# source pixels.
_HEADER = 2

_CONSTANTS = (("CHANNELS", 3), ("ROWS", _ROWS), ("WEIGHT_BITS", 22))
RESIZE_WEIGHTS = Kernel("resize_pad/resize_pad.cu", "resize_weights", _CONSTANTS)
RESIZE_PAD = Kernel("resize_pad/resize_pad.cu", "resize_pad", _CONSTANTS)


def table_shape(images: int, taps: int, places: int) -> tuple[int, int, int, int]:
    """Return the shape [images, 2, 2 + taps, places] of the int32 table of resampling weights.

    The axes are, in this order:

    - the image;
    - 0 for rows, 1 for columns;
    - 2 + `taps` values per resized row or column: index of the first source row or column that
      contributes to it, number of contributing source rows or columns, and their weights;
    - the index of the resized row or column.

    Args:
        images: Number of images.
        taps: Largest number of source pixels that contribute to a resized pixel along an axis.
        places: Height or width of the batch in pixels, whichever is larger.
    """
    return images, 2, _HEADER + taps, places


def resize_weights_launch(images: int, taps: int, places: int) -> Launch:
    """Return the grid, block and scalar arguments of the kernel `RESIZE_WEIGHTS`.

    The input is a table [images, 9] int64. The columns are, in this order:

    - GPU address of a uint8 image;
    - strides of the image in bytes, by channel, row and column;
    - height and width of the image;
    - height and width after resizing, 0 if the image has no pixels;
    - 1 if the image is resized vertically first, else 0.

    The output is the table of resampling weights. `table_shape` returns its shape for the same
    arguments.
    """
    grid = ((places + _WEIGHT_THREADS - 1) // _WEIGHT_THREADS, 2, images)
    return Launch(grid, (_WEIGHT_THREADS, 1, 1), (taps, places))


def resize_pad_launch(images: int, taps: int, places: int, height: int, width: int) -> Launch:
    """Return the grid, block and scalar arguments of the kernel `RESIZE_PAD`.

    The kernel reads the table of images that `RESIZE_WEIGHTS` reads, and the table of weights that
    `RESIZE_WEIGHTS` writes. `images`, `taps` and `places` must be those of
    `resize_weights_launch`. The output is the padded batch [images, 3, height, width] uint8.
    """
    grid = (
        (width + _BLOCK_WIDTH - 1) // _BLOCK_WIDTH,
        (height + _BLOCK_ROWS - 1) // _BLOCK_ROWS,
        images,
    )
    return Launch(grid, (_BLOCK_WIDTH, _BLOCK_HEIGHT, 1), (taps, places, height, width))


PREBUILT_KERNELS = (RESIZE_WEIGHTS, RESIZE_PAD)
