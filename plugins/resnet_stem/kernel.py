"""Compilation and launch of `resnet_stem.cu`."""

from typing import Literal

from ..runtime.compilation import Kernel, Launch

# Rows and columns of pooled pixels per block, and threads per block.
_ROWS, _COLUMNS = 7, 15
_THREADS = 256

PixelType = Literal["unsigned char", "float"]
ValueType = Literal["float16", "bfloat16"]


def resnet_stem_kernel(pixel_type: PixelType, value_type: ValueType) -> Kernel:
    """Return the kernel of `maskrcnn::resnet_stem`.

    Images have the type `pixel_type`, weights and output `value_type`.
    """
    constants = (("PIXEL", pixel_type), ("VALUE", value_type))
    return Kernel("resnet_stem/resnet_stem.cu", "resnet_stem", constants, fused_multiply_add=True)


def resnet_stem_launch(batch: int, height: int, width: int, rows: int, columns: int) -> Launch:
    """Return the grid, block and scalar arguments of `resnet_stem_kernel`.

    Inputs are the arguments of `maskrcnn::resnet_stem`, with images [batch, 3, height, width]. The
    output is [batch, rows, columns, 64].
    """
    grid = ((columns + _COLUMNS - 1) // _COLUMNS, (rows + _ROWS - 1) // _ROWS, batch)
    return Launch(grid, (_THREADS, 1, 1), (height, width))


PREBUILT_KERNELS = (
    resnet_stem_kernel("unsigned char", "float16"),
    resnet_stem_kernel("unsigned char", "bfloat16"),
)
