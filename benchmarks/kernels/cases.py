"""Benchmark cases of resizing, RoIAlign and its gradient, and a list of all kernels."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torchvision.ops import MultiScaleRoIAlign
from torchvision.transforms.v2 import functional as transforms

from ...model.resizing import resized_size
from ...plugins.pyramid_roi_align import pyramid_roi_align, pyramid_roi_align_backward
from ...plugins.resize_pad import resize_pad
from .box_cases import (
    anchor_cases,
    decoding_cases,
    encoding_cases,
    iou_cases,
    matching_cases,
    nms_cases,
    top_k_cases,
)
from .mask_cases import compression_cases, crop_cases, paste_cases, polygon_cases
from .measure import KernelBaseline, KernelCase, KernelGoal, Workload, kernel_case

STRIDES = (4, 8, 16, 32)
CHANNELS = 256
_SAMPLING_RATIO = 2
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_LAYOUTS = {"NHWC": torch.channels_last, "NCHW": torch.contiguous_format}
_POOLING_GOALS = {("fp16", "NHWC", 7): KernelGoal(milliseconds=0.6, times_peer=5)}
_POOLING_LIMIT = (
    "reads from the L2 cache: because RoIs overlap and samples are close together, features are "
    "read several times"
)
_GRADIENT_LIMIT = (
    "reads from the L2 cache: neighbouring feature cells read the gradient of the same pooled "
    "cell, and RoIs overlap"
)
_RESIZE_LIMIT = "loads of single bytes: an output pixel needs at least 2x2 source pixels"


class _PoolingInputs(NamedTuple):
    size: str
    # Feature maps [B, C, H_l, W_l], one per level.
    features: list[Tensor]
    # RoIs [B, R, 4], xyxy in input pixels.
    rois: Tensor
    # Scalar arguments of `pyramid_roi_align` and of its gradient.
    attributes: tuple[object, ...]
    # Torchvision's pooling, which takes the features and returns [B * R, C, P, P]. None:
    # torchvision does not support the features' dtype.
    torchvision: Callable[[list[Tensor]], Tensor] | None
    # Goal of `pyramid_roi_align`. None: no goal. The gradient kernel never has a goal.
    goal: KernelGoal | None


def pooling_cases(workload: Workload) -> Iterator[KernelCase]:
    """Yield benchmark cases of `pyramid_roi_align`: pooling for the box head and the mask head."""
    for size, features, rois, attributes, torchvision, goal in _pooling_inputs(workload):
        run = partial(pyramid_roi_align, features, rois, *attributes)
        baselines = []
        if torchvision is not None:
            maps = [feature.contiguous() for feature in features]
            baselines = [KernelBaseline("torchvision", partial(torchvision, maps))]
        inputs = [*features, rois]
        yield kernel_case(
            "pyramid_roi_align", size, _POOLING_LIMIT, run, inputs, *baselines, goal=goal
        )


def gradient_cases(workload: Workload) -> Iterator[KernelCase]:
    """Yield benchmark cases of `pyramid_roi_align_backward`, with the sizes of `pooling_cases`."""
    for size, features, rois, attributes, torchvision, _ in _pooling_inputs(workload):
        grad = torch.ones_like(pyramid_roi_align(features, rois, *attributes))
        run = partial(pyramid_roi_align_backward, grad, features, rois, *attributes)
        baselines = []
        if torchvision is not None:
            leaves = [feature.detach().contiguous().requires_grad_() for feature in features]
            pooled = torchvision(leaves)
            backward = partial(
                torch.autograd.grad, pooled, leaves, torch.ones_like(pooled), retain_graph=True
            )
            baselines = [KernelBaseline("torchvision", backward)]
        name, inputs = "pyramid_roi_align_backward", [grad, rois]
        yield kernel_case(name, size, _GRADIENT_LIMIT, run, inputs, *baselines)


def resizing_cases(workload: Workload) -> Iterator[KernelCase]:
    """Yield benchmark cases of `resize_pad`: enlarging small images and reducing large images."""
    batch, height, width = workload.batch, workload.height, workload.width
    for scale in (0.6, 4.0):
        sides = round(scale * height), round(scale * height * 4 / 3)
        images = [workload.randint(256, 3, *sides).to(torch.uint8) for _ in range(batch)]
        size = list(resized_size(*sides, height, width))
        torchvision = partial(_resize_with_torchvision, images, size, height, width)
        yield kernel_case(
            "resize_pad",
            f"{batch} of {sides[0]}x{sides[1]} to {height}x{width}",
            _RESIZE_LIMIT,
            partial(resize_pad, images, size * batch, height, width),
            images,
            KernelBaseline("torchvision", torchvision),
        )


KERNEL_CASES: dict[str, Callable[[Workload], Iterator[KernelCase]]] = {
    "pyramid_roi_align": pooling_cases,
    "pyramid_roi_align_backward": gradient_cases,
    "nms_keep": nms_cases,
    "stable_top_k": top_k_cases,
    "box_iou": iou_cases,
    "match_boxes": matching_cases,
    "decode_boxes": decoding_cases,
    "encode_boxes": encoding_cases,
    "grid_anchors": anchor_cases,
    "mask_targets_from_crops": crop_cases,
    "mask_targets_from_polygons": polygon_cases,
    "paste_rle": paste_cases,
    "compress_runs": compression_cases,
    "resize_pad": resizing_cases,
}


def working_cases(workload: Workload, kernels: Iterable[str]) -> Iterator[KernelCase]:
    """Yield the benchmark cases of the kernels with the names `kernels`.

    The tensors of a case are created just before the case is yielded.
    """
    for kernel in kernels:
        yield from KERNEL_CASES[kernel](workload)


def _pooling_inputs(workload: Workload) -> Iterator[_PoolingInputs]:
    scales = tuple(1 / stride for stride in STRIDES)
    for precision, dtype in _DTYPES.items():
        for layout, memory_format in _LAYOUTS.items():
            shapes = [(workload.batch, CHANNELS, *workload.grid(stride)) for stride in STRIDES]
            features = [
                torch.randn(shape, device=workload.device, dtype=dtype).contiguous(
                    memory_format=memory_format
                )
                for shape in shapes
            ]
            for full, side in ((1000, 7), (100, 14)):
                rois = workload.boxes(workload.batch, workload.count(full))
                yield _PoolingInputs(
                    f"{workload.batch}x{rois.shape[1]}x{side}x{side}, {precision} {layout}",
                    features,
                    rois,
                    (side, _SAMPLING_RATIO, scales, 4, 224.0, False, False),
                    None
                    if precision == "bf16"
                    else _torchvision_pooling(workload, rois.to(dtype), side),
                    _POOLING_GOALS.get((precision, layout, side)),
                )


def _torchvision_pooling(
    workload: Workload, rois: Tensor, side: int
) -> Callable[[list[Tensor]], Tensor]:
    names = [str(stride) for stride in STRIDES]
    pool = MultiScaleRoIAlign(names, side, _SAMPLING_RATIO)
    sizes, lists = [(workload.height, workload.width)] * workload.batch, list(rois)

    def run(features: list[Tensor]) -> Tensor:
        pooled: Tensor = pool(dict(zip(names, features, strict=True)), lists, sizes)
        return pooled

    return run


def _resize_with_torchvision(
    images: list[Tensor], size: list[int], height: int, width: int
) -> Tensor:
    margins = [0, 0, width - size[1], height - size[0]]
    resized = (transforms.resize(image, size, antialias=True) for image in images)
    return torch.stack([transforms.pad(image, margins) for image in resized])
