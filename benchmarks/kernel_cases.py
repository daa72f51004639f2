"""The tasks that every kernel is measured at."""

from collections.abc import Callable, Iterable, Iterator

from .box_kernel_cases import (
    anchor_cases,
    decoding_cases,
    encoding_cases,
    iou_cases,
    matching_cases,
    selection_cases,
    suppression_cases,
)
from .image_kernel_cases import resizing_cases
from .kernels import KernelCase
from .mask_kernel_cases import (
    compression_cases,
    crop_cases,
    paste_cases,
    polygon_cases,
    run_length_cases,
)
from .pooling_kernel_cases import gradient_cases, pooling_cases
from .workload import Workload

KERNEL_CASES: dict[str, Callable[[Workload], Iterator[KernelCase]]] = {
    "pyramid_roi_align": pooling_cases,
    "pyramid_roi_align_backward": gradient_cases,
    "nms_keep": suppression_cases,
    "stable_top_k": selection_cases,
    "box_iou": iou_cases,
    "match_boxes": matching_cases,
    "decode_boxes": decoding_cases,
    "encode_boxes": encoding_cases,
    "grid_anchors": anchor_cases,
    "mask_targets_from_crops": crop_cases,
    "mask_targets_from_polygons": polygon_cases,
    "mask_targets_from_rle": run_length_cases,
    "paste_rle": paste_cases,
    "compress_runs": compression_cases,
    "resize_pad": resizing_cases,
}


def working_cases(workload: Workload, kernels: Iterable[str]) -> Iterator[KernelCase]:
    """The cases, one after the other, so that their tensors need not live all at once."""
    for kernel in kernels:
        yield from KERNEL_CASES[kernel](workload)
