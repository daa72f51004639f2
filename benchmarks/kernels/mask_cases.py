"""Benchmark cases of the kernels for masks: training targets, pasting and encoding."""

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from pycocotools import mask as coco_mask
from torch import Tensor
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.ops import roi_align

from ...model.masks import rles_from_probabilities
from ...plugins.compress_runs import compress_runs
from ...plugins.mask_targets import mask_targets_from_crops
from ...plugins.paste_rle import paste_rle
from ...plugins.polygon_mask_targets import mask_targets_from_polygons
from ...plugins.run_lengths import coco_strings
from .measure import KernelBaseline, KernelCase, KernelGoal, Workload, kernel_case

# Side in pixels of a mask target and of a predicted mask.
SIDE = 28
# Side in pixels of a cropped ground-truth mask.
_CROP = 112
# Number of corners of a polygon.
_CORNERS = 40
# Maximum number of run lengths of a mask.
_MAX_RUNS = 4096
_PIXEL_LIMIT = "latency of dependent loads: one thread block computes the whole target of a RoI"
_POLYGON_LIMIT = "arithmetic in double precision, one edge per thread"
_COMPRESSION_LIMIT = "prefix sums of numbers of characters, in one thread block per mask"
_PASTE_LIMIT = "pixels of the largest boxes: one thread block processes all pixels of an instance"


def crop_cases(workload: Workload) -> Iterator[KernelCase]:
    """Yield the benchmark case of `mask_targets_from_crops`.

    The kernel resamples ground-truth masks of 112x112 pixels to mask targets of RoIs.
    """
    batch, instances, rois = workload.batch, workload.count(20), workload.count(128)
    masks = (workload.rand(batch, instances, _CROP, _CROP) < 0.5).to(torch.uint8)
    boxes = workload.rand(batch, rois, 2, 2).sort(dim=2).values.flatten(2) * _CROP
    matched = workload.randint(instances, batch, rois)
    planes = matched + instances * torch.arange(batch, device=workload.device)[:, None]
    indexed = torch.cat([planes.view(-1, 1), boxes.view(-1, 4)], dim=1)
    yield kernel_case(
        "mask_targets_from_crops",
        f"{batch}x{rois} of {batch}x{instances}x{_CROP}x{_CROP}",
        _PIXEL_LIMIT,
        partial(mask_targets_from_crops, masks, boxes, matched, SIDE),
        [masks, boxes, matched],
        KernelBaseline(
            "torchvision", lambda: roi_align(masks.flatten(0, 1)[:, None].float(), indexed, SIDE)
        ),
    )


def polygon_cases(workload: Workload) -> Iterator[KernelCase]:
    """Yield the benchmark case of `mask_targets_from_polygons`, with one polygon per instance."""
    count, rois, owners = _instances_and_rois(workload)
    angles = torch.arange(_CORNERS, device=workload.device) * math.tau / _CORNERS
    unit = workload.height / 8
    shape = torch.stack([angles.cos(), angles.sin()], dim=1) * unit
    offsets = workload.rand(count, 1, 2) * 5 * unit
    rings = shape * (0.7 + 0.3 * workload.rand(count, _CORNERS, 1)) + offsets
    bounds = torch.arange(count + 1, device=workload.device)
    arguments = [rings.flatten(0, 1), bounds * _CORNERS, bounds, rois, owners]
    on_host = (rings[owners].double().cpu().numpy(), rois.double().cpu().numpy())
    yield kernel_case(
        "mask_targets_from_polygons",
        f"{len(rois)} of {count} rings of {_CORNERS}",
        _POLYGON_LIMIT,
        partial(mask_targets_from_polygons, *arguments, SIDE),
        arguments,
        KernelBaseline("pycocotools", partial(_rasterise, *on_host), on_host=True),
    )


def paste_cases(workload: Workload) -> Iterator[KernelCase]:
    """Yield the benchmark case of `paste_rle`: 100 masks per image, each a soft-edged disc."""
    count, size = workload.count(100 * workload.batch), (workload.height, workload.image_width)
    axis = torch.arange(SIDE, device=workload.device) - (SIDE - 1) / 2
    radius = torch.hypot(axis[:, None], axis)
    masks = torch.sigmoid((11 - radius) * 2 + workload.rand(count, SIDE, SIDE) - 0.5)
    boxes = workload.boxes(count)
    sizes = torch.tensor([size], device=workload.device).expand(count, 2).contiguous()

    def pasted() -> NDArray[np.uint8]:
        images = paste_masks_in_image(masks[:, None], boxes, size)[:, 0] > 0.5
        # The layout that pycocotools needs: [H, W, N] in column-major order.
        columns: NDArray[np.uint8] = images.byte().transpose(1, 2).contiguous().cpu().numpy()
        return columns.T

    on_host = (masks.cpu().numpy(), boxes.cpu().numpy(), *size)
    yield kernel_case(
        "paste_rle",
        f"{count} at {size[0]}x{size[1]}",
        _PASTE_LIMIT,
        partial(paste_rle, masks, boxes, sizes, _MAX_RUNS),
        [masks, boxes, sizes],
        KernelBaseline(
            "pycocotools of pasted masks", partial(coco_mask.encode, pasted()), on_host=True
        ),
        KernelBaseline(
            "torchvision + pycocotools", lambda: coco_mask.encode(pasted()), on_host=True
        ),
        KernelBaseline(
            "serving on the CPU", partial(rles_from_probabilities, *on_host), on_host=True
        ),
        goal=KernelGoal(milliseconds=1),
    )


def compression_cases(workload: Workload) -> Iterator[KernelCase]:
    """Yield the benchmark case of `compress_runs`: encoding of run lengths as compressed COCO RLE.

    The input is the run lengths of 100 masks per image. A mask has half as many columns as the
    image. Each column has one run of zeros and one run of ones.
    """
    count, columns = workload.count(100 * workload.batch), workload.image_width // 2
    zeros, ones = workload.randint(40, 2, count, columns).int() + workload.height // 2 - 20
    runs = torch.stack([zeros, ones], dim=2).flatten(1)
    num_runs = torch.full((count,), runs.shape[1], dtype=torch.int32, device=workload.device)
    on_host = runs.cpu().numpy(), num_runs.cpu().numpy()
    yield kernel_case(
        "compress_runs",
        f"{count}x{runs.shape[1]}",
        _COMPRESSION_LIMIT,
        partial(compress_runs, runs, num_runs, 2 * runs.numel()),
        [runs, num_runs],
        KernelBaseline("NumPy", partial(coco_strings, *on_host), on_host=True),
    )


def _instances_and_rois(workload: Workload) -> tuple[int, Tensor, Tensor]:
    """Return the instance count, K RoIs [K, 4] (xyxy in pixels), and their instance indices [K]."""
    count = workload.count(20 * workload.batch)
    rois = workload.count(128 * workload.batch)
    unit = workload.height / 8
    corners = workload.rand(rois, 2) * 4 * unit
    boxes = torch.cat([corners, corners + (0.2 + 2 * workload.rand(rois, 2)) * unit], dim=1)
    return count, boxes, workload.randint(count, rois)


def _rasterise(rings: NDArray[np.float64], rois: NDArray[np.float64]) -> list[NDArray[np.uint8]]:
    """Rasterise one polygon per RoI with pycocotools, and return one mask [SIDE, SIDE] per RoI.

    `rings` are the polygons [K, corners, 2], x and y in pixels. `rois` are [K, 4], xyxy in pixels.
    """
    scales = SIDE / np.maximum(rois[:, 2:] - rois[:, :2], 1)
    scaled = ((rings - rois[:, None, :2]) * scales[:, None]).reshape(len(rings), -1).tolist()
    return [coco_mask.decode(coco_mask.frPyObjects([ring], SIDE, SIDE)) for ring in scaled]
