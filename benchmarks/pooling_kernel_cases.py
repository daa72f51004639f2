"""RoIAlign over a feature pyramid, and its gradient."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torchvision.ops import MultiScaleRoIAlign

from ..plugins.pyramid_roi_align import pyramid_roi_align, pyramid_roi_align_backward
from .kernels import Goal, KernelCase, Peer
from .workload import Workload, kernel_case

STRIDES = (4, 8, 16, 32)
CHANNELS = 256
_SAMPLING_RATIO = 2
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_LAYOUTS = {"NHWC": torch.channels_last, "NCHW": torch.contiguous_format}
_GOALS = {("fp16", "NHWC", 7): Goal(milliseconds=0.6, times_peer=5)}
_POOLING_LIMIT = (
    "reads from the L2 cache: RoIs overlap and samples are neighbours, so that features are read "
    "several times"
)
_GRADIENT_LIMIT = (
    "atomic additions in the L2 cache; before and after them the bandwidth of clearing the sums "
    "and of rounding them to the features' type"
)


class _Pooling(NamedTuple):
    size: str
    features: list[Tensor]
    """[B, C, H_l, W_l] a level."""
    rois: Tensor
    """[B, R, 4]."""
    attributes: tuple[object, ...]
    """Of both operations."""
    torchvision: Callable[[list[Tensor]], Tensor] | None
    """The peer, from features to [B R, C, P, P]."""
    goal: Goal | None
    """Of pooling; its gradient has none."""


def pooling_cases(workload: Workload) -> Iterator[KernelCase]:
    """Features pooled for the box and the mask head."""
    for size, features, rois, attributes, torchvision, goal in _poolings(workload):
        run = partial(pyramid_roi_align, features, rois, *attributes)
        peers: tuple[Peer, ...] = ()
        if torchvision is not None:
            maps = [feature.contiguous() for feature in features]
            peers = (Peer("torchvision", partial(torchvision, maps)),)
        inputs = [*features, rois]
        yield kernel_case("pyramid_roi_align", size, _POOLING_LIMIT, run, inputs, peers, goal)


def gradient_cases(workload: Workload) -> Iterator[KernelCase]:
    """The gradients of these features."""
    for size, features, rois, attributes, torchvision, _ in _poolings(workload):
        grad = torch.ones_like(pyramid_roi_align(features, rois, *attributes))
        run = partial(pyramid_roi_align_backward, grad, features, rois, *attributes)
        peers: tuple[Peer, ...] = ()
        if torchvision is not None:
            leaves = [feature.detach().contiguous().requires_grad_() for feature in features]
            pooled = torchvision(leaves)
            theirs = partial(
                torch.autograd.grad, pooled, leaves, torch.ones_like(pooled), retain_graph=True
            )
            peers = (Peer("torchvision", theirs),)
        inputs = [grad, rois]
        yield kernel_case("pyramid_roi_align_backward", size, _GRADIENT_LIMIT, run, inputs, peers)


def _poolings(workload: Workload) -> Iterator[_Pooling]:
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
                yield _Pooling(
                    f"{workload.batch}x{rois.shape[1]}x{side}x{side}, {precision} {layout}",
                    features,
                    rois,
                    (side, _SAMPLING_RATIO, scales, 4, 224.0, False, False),
                    None if precision == "bf16" else _torchvision(workload, rois.to(dtype), side),
                    _GOALS.get((precision, layout, side)),
                )


def _torchvision(workload: Workload, rois: Tensor, side: int) -> Callable[[list[Tensor]], Tensor]:
    names = [str(stride) for stride in STRIDES]
    pool = MultiScaleRoIAlign(names, side, _SAMPLING_RATIO)
    sizes, lists = [(workload.height, workload.width)] * workload.batch, list(rois)

    def pooled(features: list[Tensor]) -> Tensor:
        answer: Tensor = pool(dict(zip(names, features, strict=True)), lists, sizes)
        return answer

    return pooled
