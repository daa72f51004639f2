"""Compilation and launch of the kernels in `mask_targets.cu`."""

from ..compilation import Kernel, Launch

_THREADS = 256


def crop_targets_kernel(side: int) -> Kernel:
    """The kernel that resamples masks of pixels to M x M targets."""
    return Kernel("mask_targets.cu", "mask_targets_from_crops", _constants(side))


def crop_targets_launch(images: int, rois: int, instances: int, height: int, width: int) -> Launch:
    """Launch for masks [B, G, H, W] uint8, boxes [B, K, 4] float32 and matched [B, K] int64.

    Its output is targets [B, K, M, M] float32.
    """
    return Launch((images * rois, 1, 1), (_THREADS, 1, 1), (rois, instances, height, width))


def rle_targets_kernel(side: int) -> Kernel:
    """The kernel that resamples masks of run lengths to M x M targets."""
    return Kernel("mask_targets.cu", "mask_targets_from_rle", _constants(side))


def rle_targets_launch(rois: int, instances: int) -> Launch:
    """Launch for ends [R], offsets [N + 1], sizes [N, 2], boxes [K, 4] float32 and matched [K].

    `ends` are the sums of all run lengths up to and with each; what is not boxes is int64. The
    output is targets [K, M, M] float32.
    """
    return Launch((rois, 1, 1), (_THREADS, 1, 1), (instances,))


def _constants(side: int) -> tuple[tuple[str, int], ...]:
    return (("SIDE", side), ("THREADS", _THREADS))


VARIANTS = (crop_targets_kernel(28), rle_targets_kernel(28))
