"""Benchmark cases of the kernels for boxes: anchors, IoU, matching, deltas, top-k and NMS."""

from collections.abc import Iterator
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder, Matcher
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import batched_nms, clip_boxes_to_image
from torchvision.ops import box_iou as torchvision_iou

from ...plugins.box_deltas import decode_boxes, encode_boxes
from ...plugins.box_iou import box_iou
from ...plugins.grid_anchors import grid_anchors
from ...plugins.match_boxes import match_boxes
from ...plugins.nms_keep import nms_keep
from ...plugins.stable_top_k import stable_top_k
from .measure import KernelBaseline, KernelCase, KernelGoal, Workload, kernel_case

STRIDES = (4, 8, 16, 32, 64)
# Anchors per cell of a feature map.
ANCHORS_PER_CELL = 3
_LAUNCH_LIMIT = "launch overhead: too little work for a GPU"
_WRITE_LIMIT = "bandwidth of the writes"
_NMS_LIMIT = "latency of dependent steps: one thread block processes a set of boxes tile by tile"
_TOP_K_LIMIT = (
    "latency of dependent steps in a thread block: the passes of a radix selection and of a radix "
    "sort"
)
_MATCHING_LIMIT = (
    "arithmetic: the IoU of each candidate with all ground-truth boxes that overlap the bounding "
    "box of the candidates of its warp"
)

_NMS_SIZES = (
    # Images, sets of boxes per image (FPN levels), boxes per set, classes, IoU threshold, maximum
    # of kept boxes per set, goal.
    (8, 5, 1000, 1, 0.7, 1000, KernelGoal(milliseconds=0.4)),
    (8, 5, 2000, 1, 0.7, 2000, None),
    (8, 1, 2000, 80, 0.5, 100, None),
    (1, 1, 12000, 1, 0.7, 2000, None),
)
_TOP_K_SIZES = (
    # Number of scores per image, and number k of selected scores. The first five pairs are for the
    # anchors of the FPN levels. The others are for class scores, detections, proposals of all
    # levels, and anchors of a C4 model.
    *((cells * ANCHORS_PER_CELL, 1000) for cells in (67200, 16800, 4200, 1050, 273)),
    (80000, 2000),
    (2000, 100),
    (5000, 1000),
    (63000, 12000),
)


def nms_cases(workload: Workload) -> Iterator[KernelCase]:
    """Yield benchmark cases of `nms_keep`: FPN proposals, detections, and C4 proposals.

    NMS is separate for each level of FPN proposals, and for each class of detections.
    """
    for max_images, levels, full, classes, threshold, max_keep, goal in _NMS_SIZES:
        images, count = min(max_images, workload.batch), workload.count(full)
        kinds = f" of {classes} classes" if classes > 1 else ""
        boxes = workload.boxes(images * levels, count)
        labels = workload.randint(classes, images * levels, count)
        # Torchvision's NMS takes one image at a time. The levels of an image get different class
        # labels, so that boxes of one level do not suppress those of another.
        offsets = torch.arange(levels, device=workload.device).repeat(images)[:, None] * classes
        scores = torch.arange(count, 0, -1.0, device=workload.device).repeat(levels)
        lists = list(
            zip(boxes.view(images, -1, 4), (offsets + labels).view(images, -1), strict=True)
        )
        yield kernel_case(
            "nms_keep",
            f"{images * levels}x{count}{kinds}, at most {max_keep}",
            _NMS_LIMIT,
            partial(nms_keep, boxes, labels, threshold, max_keep),
            [boxes, labels],
            KernelBaseline("torchvision", partial(_torchvision_nms, lists, scores, threshold)),
            goal=goal,
        )


def _torchvision_nms(
    lists: list[tuple[Tensor, Tensor]], scores: Tensor, threshold: float
) -> list[Tensor]:
    return [batched_nms(boxes, scores, labels, threshold) for boxes, labels in lists]


def top_k_cases(workload: Workload) -> Iterator[KernelCase]:
    """Yield benchmark cases of `stable_top_k`: selection of scores before and after NMS."""
    for full, k in _TOP_K_SIZES:
        length = workload.count(full)
        k = min(workload.count(k), length)
        scores = workload.randn(workload.batch, length)
        yield kernel_case(
            "stable_top_k",
            f"{k} of {workload.batch}x{length}",
            _TOP_K_LIMIT,
            partial(stable_top_k, scores, k),
            [scores],
            KernelBaseline("torch.topk", partial(torch.topk, scores, k)),
            KernelBaseline("torch.sort", partial(torch.sort, scores, descending=True, stable=True)),
        )


def iou_cases(workload: Workload) -> Iterator[KernelCase]:
    """Yield the benchmark case of `box_iou`: IoU of ground-truth boxes with all anchors."""
    truth, anchors = _truth(workload), _anchors(workload)
    yield kernel_case(
        "box_iou",
        f"{_size(truth)} by {anchors.shape[1]} anchors",
        _WRITE_LIMIT,
        partial(box_iou, truth, anchors),
        [truth, anchors],
        KernelBaseline("torchvision", lambda: [torchvision_iou(b, anchors[0]) for b in truth]),
    )


def matching_cases(workload: Workload) -> Iterator[KernelCase]:
    """Yield the benchmark case of `match_boxes`: matching of all anchors to ground-truth boxes."""
    truth, anchors = _truth(workload), _anchors(workload)
    labels = torch.ones(truth.shape[:2], dtype=torch.int64, device=workload.device)
    matcher = Matcher(0.7, 0.3, allow_low_quality_matches=True)
    yield kernel_case(
        "match_boxes",
        f"{_size(truth)} by {anchors.shape[1]} anchors",
        _MATCHING_LIMIT,
        partial(match_boxes, truth, labels, anchors, 0.7, 0.3, True),
        [truth, labels, anchors],
        KernelBaseline(
            "torchvision", lambda: [matcher(torchvision_iou(b, anchors[0])) for b in truth]
        ),
    )


def decoding_cases(workload: Workload) -> Iterator[KernelCase]:
    """Yield the benchmark case of `decode_boxes`: deltas of selected anchors of all FPN levels."""
    anchors, selected = _anchors(workload), workload.count(4819)
    deltas = workload.randn(workload.batch, anchors.shape[1], 1, 4)
    indices = workload.randint(anchors.shape[1], workload.batch, selected)
    image_sizes = torch.tensor(
        [[workload.height, workload.image_width]] * workload.batch, device=workload.device
    )
    coder, size = BoxCoder((1.0, 1.0, 1.0, 1.0)), (workload.height, workload.image_width)
    rows = torch.arange(workload.batch, device=workload.device)[:, None]

    def gathered() -> tuple[Tensor, Tensor]:
        return deltas[rows, indices].view(-1, 4), anchors[0, indices].view(-1, 4)

    yield kernel_case(
        "decode_boxes",
        f"{workload.batch}x{selected} of {anchors.shape[1]}",
        _LAUNCH_LIMIT,
        partial(decode_boxes, deltas, anchors, indices, image_sizes, 1.0, 1.0, False, 1e-3),
        [indices, image_sizes, *gathered()],
        KernelBaseline(
            "torchvision", lambda: clip_boxes_to_image(coder.decode_single(*gathered()), size)
        ),
    )


def encoding_cases(workload: Workload) -> Iterator[KernelCase]:
    """Yield the benchmark case of `encode_boxes`: deltas from RoIs to ground-truth boxes."""
    rois = workload.boxes(workload.batch, workload.count(512))
    truth, coder = rois + 3, BoxCoder((10.0, 10.0, 5.0, 5.0))
    yield kernel_case(
        "encode_boxes",
        _size(rois),
        _LAUNCH_LIMIT,
        partial(encode_boxes, truth, rois, 10.0, 5.0),
        [truth, rois],
        KernelBaseline(
            "torchvision", partial(coder.encode_single, truth.view(-1, 4), rois.view(-1, 4))
        ),
    )


def anchor_cases(workload: Workload) -> Iterator[KernelCase]:
    """Yield the benchmark case of `grid_anchors`: generation of all anchors of an FPN."""
    cells = _cell_anchors(workload)
    steps, grids = _maps(workload)
    generator = AnchorGenerator(((1,),) * len(STRIDES), ((1.0,),) * len(STRIDES))
    generator.cell_anchors = list(cells)
    yield kernel_case(
        "grid_anchors",
        f"{ANCHORS_PER_CELL * sum(rows * columns for rows, columns in grids)} anchors",
        _LAUNCH_LIMIT,
        partial(grid_anchors, cells, [*chain(*steps)], [*chain(*grids)]),
        [cells],
        KernelBaseline("torchvision", lambda: torch.cat(generator.grid_anchors(grids, steps))),
    )


def _truth(workload: Workload) -> Tensor:
    return workload.boxes(workload.batch, workload.count(60))


def _cell_anchors(workload: Workload) -> Tensor:
    sides = 8 * torch.tensor(STRIDES, device=workload.device)[:, None, None]
    shapes = torch.tensor([[0.7, 1.4], [1.0, 1.0], [1.4, 0.7]], device=workload.device)
    halves = 0.5 * sides * shapes
    return torch.cat([-halves, halves], dim=2)


def _anchors(workload: Workload) -> Tensor:
    steps, grids = _maps(workload)
    anchors: Tensor = grid_anchors(_cell_anchors(workload), [*chain(*steps)], [*chain(*grids)])
    return anchors[None]


def _maps(workload: Workload) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return two lists with one item per FPN level: strides and sizes of the feature maps.

    Strides are (y, x) in pixels, sizes (height, width) in cells.
    """
    grids = [workload.grid(stride) for stride in STRIDES]
    return [(workload.height // rows, workload.width // columns) for rows, columns in grids], grids


def _size(boxes: Tensor) -> str:
    return "x".join(str(size) for size in boxes.shape[:-1])
