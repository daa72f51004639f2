"""`maskrcnn::mask_targets_from_polygons`: mask targets rasterised from polygons.

Training does not use this operation. Instead, the data loader rasterises the masks, and
`maskrcnn::mask_targets_from_crops` resamples them.

Specification of all implementations, whose results are equal bit for bit: polygons are scaled in
double precision so that the RoI becomes M x M pixels, and rasterised as by pycocotools. A RoI side
below one pixel is enlarged to one pixel. The scaled coordinates of the polygons' vertices are
clamped to -100 * M .. 100 * M. The argument `matched` holds the instance index of each RoI. The
target of a RoI is zero if this index is out of range or a coordinate of the RoI is not finite.
"""

import warnings
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from pycocotools import mask as coco_mask
from torch import Tensor

from ..runtime.arguments import kernel_argument
from ..runtime.launching import launch_kernel
from .kernel import REACH, polygon_targets_kernel, polygon_targets_launch


@torch.library.custom_op(
    "maskrcnn::mask_targets_from_polygons", mutates_args=(), device_types="cpu"
)
def mask_targets_from_polygons(
    vertices: Tensor,
    ring_offsets: Tensor,
    instance_offsets: Tensor,
    boxes: Tensor,
    matched: Tensor,
    side: int,
) -> Tensor:
    """Rasterise polygons within RoIs to mask targets.

    An instance is the union of its polygons, which are called rings.

    Args:
        vertices: [V, 2] float32, x and y of the corners of all rings, finite; vertices after the
            last ring are padding.
        ring_offsets: [R + 1] int64, index of the first vertex of each of R rings, and the index
            after the last ring's last vertex.
        instance_offsets: [N + 1] int64, index of the first ring of each of N instances, and the
            index after the last instance's last ring.
        boxes: [K, 4] float32, K RoIs, xyxy in the pixels of the vertices.
        matched: [K] int64, instance index of each RoI.
        side: height and width M of a target.

    Returns:
        [K, M, M] float32, 0 or 1.
    """
    targets = torch.zeros(len(matched), side, side)
    corners, starts = vertices.double().numpy(), ring_offsets.tolist()
    for owner, members in _rois_by_owner(boxes, matched, len(instance_offsets) - 1):
        first, end = instance_offsets[owner : owner + 2].tolist()
        rings = [corners[starts[ring] : starts[ring + 1]] for ring in range(first, end)]
        for member in members.tolist():
            mask = _rasterise(rings, boxes[member].double().numpy(), side)
            targets[member] = torch.from_numpy(mask)
    return targets


@mask_targets_from_polygons.register_fake
def _(
    vertices: Tensor,
    ring_offsets: Tensor,
    instance_offsets: Tensor,
    boxes: Tensor,
    matched: Tensor,
    side: int,
) -> Tensor:
    return boxes.new_empty(matched.shape[0], side, side)


@mask_targets_from_polygons.register_kernel("cuda")
def _(
    vertices: Tensor,
    ring_offsets: Tensor,
    instance_offsets: Tensor,
    boxes: Tensor,
    matched: Tensor,
    side: int,
) -> Tensor:
    rois, instances = matched.shape[0], instance_offsets.shape[0] - 1
    inputs = [
        kernel_argument("vertices", vertices, torch.float32, (-1, 2)),
        kernel_argument("ring_offsets", ring_offsets, torch.int64, (-1,)),
        kernel_argument("instance_offsets", instance_offsets, torch.int64, (-1,)),
        kernel_argument("boxes", boxes, torch.float32, (rois, 4)),
        kernel_argument("matched", matched, torch.int64, (rois,)),
    ]
    targets = boxes.new_empty(rois, side, side)
    launch = polygon_targets_launch(rois, instances)
    launch_kernel(polygon_targets_kernel(side), launch, inputs, [targets])
    return targets


def _rois_by_owner(boxes: Tensor, matched: Tensor, instances: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the index of each instance that has RoIs, and the indices [n] of its RoIs.

    RoIs are skipped if their box is not finite or their instance index is out of range.

    Args:
        boxes: [K, 4], boxes of K RoIs.
        matched: [K] int64, instance index of each RoI.
        instances: number of instances.
    """
    owned = (matched >= 0) & (matched < instances) & boxes.isfinite().all(dim=1)
    for owner in torch.unique(matched[owned]).tolist():
        yield owner, (owned & (matched == owner)).nonzero()[:, 0]


def _rasterise(
    rings: list[NDArray[np.float64]], box: NDArray[np.float64], side: int
) -> NDArray[np.uint8]:
    """Rasterise rings of n vertices [n, 2] within a box [4], and return a mask [side, side].

    Vertices and box (xyxy) are in pixels. The mask is uint8, 0 or 1.
    """
    scale = side / np.maximum(box[2:] - box[:2], 1)
    # Clamp the corners: pycocotools walks along the edges, so its time grows with their length.
    reach = REACH * side
    scaled = [((ring - box[:2]) * scale).clip(-reach, reach).ravel().tolist() for ring in rings]
    # A ring of fewer than three corners has no area. pycocotools reads four numbers as a box.
    usable = [ring for ring in scaled if len(ring) >= 6]
    if not usable:
        return np.zeros((side, side), np.uint8)
    union = coco_mask.merge(coco_mask.frPyObjects(usable, side, side))
    with warnings.catch_warnings():
        # pycocotools does not support a keyword that NumPy 2 passes.
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        mask: NDArray[np.uint8] = coco_mask.decode(union)
    return mask
