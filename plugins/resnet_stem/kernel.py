"""Compilation and launch of `resnet_stem.cu` and `resnet_stem_sm90.cu`."""

from typing import Literal

from ..runtime.compilation import Kernel, Launch

PixelType = Literal["unsigned char", "float"]
ValueType = Literal["float16", "bfloat16"]

# Threads per block. Pooled (rows, columns) that a block computes, in `resnet_stem.cu` and in
# `resnet_stem_sm90.cu`.
_THREADS = 256
_TILE, _TILE_SM90 = (7, 15), (10, 31)
# Shared memory per block of `resnet_stem_sm90.cu`, in bytes: 47x134 pixels, weights, and two maps
# of 64 pixels.
_SHARED_SM90 = 8 * 47 * 134 + 2 * 14 * 64 * 16 + 2 * 2 * 64 * (64 + 8)


def resnet_stem_kernel(pixel_type: PixelType, value_type: ValueType, sm90: bool) -> Kernel:
    """Return the kernel of `maskrcnn::resnet_stem`.

    Images have the type `pixel_type`, weights and output `value_type`. With `sm90`, return the
    kernel that runs only on GPUs of compute capability 9.0.
    """
    constants = (("PIXEL", pixel_type), ("VALUE", value_type))
    if not sm90:
        source = "resnet_stem/resnet_stem.cu"
        return Kernel(source, "resnet_stem", constants, fused_multiply_add=True)
    return Kernel(
        "resnet_stem/resnet_stem_sm90.cu",
        "resnet_stem_sm90",
        (*constants, ("SHARED_BYTES", _SHARED_SM90)),
        fused_multiply_add=True,
        shared_memory=_SHARED_SM90,
    )


def resnet_stem_launch(
    batch: int, height: int, width: int, rows: int, columns: int, sm90: bool
) -> Launch:
    """Return the grid, block and scalar arguments of a kernel from `resnet_stem_kernel`.

    `sm90` must be the value with which the kernel was made. The kernel's inputs are the arguments
    of `maskrcnn::resnet_stem`, with images [batch, 3, height, width]. Its output is
    [batch, rows, columns, 64]; `rows` and `columns` are a quarter of height and width, rounded up.
    """
    tile_rows, tile_columns = _TILE_SM90 if sm90 else _TILE
    grid = (
        (columns + tile_columns - 1) // tile_columns,
        (rows + tile_rows - 1) // tile_rows,
        batch,
    )
    return Launch(grid, (_THREADS, 1, 1), (height, width))


_VALUE_TYPES: tuple[ValueType, ...] = ("float16", "bfloat16")
PREBUILT_KERNELS = tuple(
    resnet_stem_kernel("unsigned char", value_type, sm90)
    for sm90 in (False, True)
    for value_type in _VALUE_TYPES
)
