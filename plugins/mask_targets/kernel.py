"""Compilation and launch of the kernels in `mask_targets.cu`."""

from ..runtime.compilation import Kernel, Launch

# Threads per block.
_THREADS = 256


def crop_targets_kernel(side: int) -> Kernel:
    """Return the kernel that resamples pixel masks to mask targets of `side` x `side`."""
    return Kernel("mask_targets/mask_targets.cu", "mask_targets_from_crops", _constants(side))


def crop_targets_launch(images: int, rois: int, instances: int, height: int, width: int) -> Launch:
    """Return the grid, block and scalar arguments of `crop_targets_kernel`.

    With B = `images`, inputs are masks [B, instances, height, width] uint8, RoI boxes [B, rois, 4]
    float32 and, for each RoI, the index of its mask among the image's masks [B, rois] int64. The
    output is mask targets [B, rois, side, side] float32.
    """
    return Launch((images * rois, 1, 1), (_THREADS, 1, 1), (rois, instances, height, width))


def rle_targets_kernel(side: int) -> Kernel:
    """Return the kernel that resamples run-length masks to mask targets of `side` x `side`."""
    return Kernel("mask_targets/mask_targets.cu", "mask_targets_from_rle", _constants(side))


def rle_targets_launch(rois: int, instances: int) -> Launch:
    """Return the grid, block and scalar arguments of `rle_targets_kernel`.

    The kernel's inputs are, in this order:

    - cumulative sum of the concatenated run lengths of all masks, int64;
    - index of each mask's first run, then the number of all runs, [instances + 1] int64;
    - mask heights and widths, [instances, 2] int64;
    - RoI boxes, [rois, 4] float32;
    - mask index of each RoI, [rois] int64.

    The output is mask targets [rois, side, side] float32.
    """
    return Launch((rois, 1, 1), (_THREADS, 1, 1), (instances,))


def _constants(side: int) -> tuple[tuple[str, int], ...]:
    return (("SIDE", side), ("THREADS", _THREADS))


PREBUILT_KERNELS = (crop_targets_kernel(28), rle_targets_kernel(28))
