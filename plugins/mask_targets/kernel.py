"""Compilation and launch of `mask_targets.cu`."""

from ..runtime.compilation import Kernel, Launch

# Threads per block.
_THREADS = 256


def crop_targets_kernel(side: int) -> Kernel:
    """Return the kernel that resamples pixel masks to mask targets of `side` x `side`."""
    constants = (("SIDE", side), ("THREADS", _THREADS))
    return Kernel("mask_targets/mask_targets.cu", "mask_targets_from_crops", constants)


def crop_targets_launch(images: int, rois: int, instances: int, height: int, width: int) -> Launch:
    """Return the grid, block and scalar arguments of `crop_targets_kernel`.

    With B = `images`, inputs are masks [B, instances, height, width] uint8, RoI boxes [B, rois, 4]
    float32 and, for each RoI, the index of its mask among the image's masks [B, rois] int64. The
    output is mask targets [B, rois, side, side] float32.
    """
    return Launch((images * rois, 1, 1), (_THREADS, 1, 1), (rois, instances, height, width))


PREBUILT_KERNELS = (crop_targets_kernel(28),)
