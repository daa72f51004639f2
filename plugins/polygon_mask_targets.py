"""`maskrcnn::mask_targets_from_polygons`: outlines of instances drawn within RoIs.

Contract, held by every implementation bit for bit: outlines are scaled, in double precision, so
that the RoI becomes M x M pixels, and drawn as pycocotools draws them. A RoI counts as at least a
pixel wide and high. Corners that lie farther off than 100 M of the scaled pixels are moved in, as
pycocotools walks along every edge. `matched` names the instance of each RoI; a RoI whose number is
no instance's, or whose box is not finite, gets zeros.
"""

import warnings

import numpy as np
import torch
from numpy.typing import NDArray
from pycocotools import mask as coco_mask
from torch import Tensor

from .arguments import kernel_argument
from .kernels.polygon_mask_targets import REACH, polygon_targets_kernel, polygon_targets_launch
from .launching import launch_kernel
from .mask_targets import rois_by_owner


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
    """Targets from outlines: what any ring of an instance covers belongs to it.

    Args:
        vertices: [V, 2] float32, x and y of the corners of one ring after another, finite; what
            follows the last ring is padding.
        ring_offsets: [R + 1] int64, where in `vertices` each ring begins, and where the last ends.
        instance_offsets: [N + 1] int64, where among the rings each instance begins, and where the
            last ends.
        boxes: [K, 4] float32, xyxy in pixels of the vertices.
        matched: [K] int64, the instance of each RoI.
        side: M.

    Returns:
        [K, M, M] float32, 0 or 1.

    Raises:
        ValueError: on a GPU, an argument has another dtype or shape.
    """
    targets = torch.zeros(len(matched), side, side)
    corners, starts = vertices.double().numpy(), ring_offsets.tolist()
    for owner, members in rois_by_owner(boxes, matched, len(instance_offsets) - 1):
        first, end = instance_offsets[owner : owner + 2].tolist()
        rings = [corners[starts[ring] : starts[ring + 1]] for ring in range(first, end)]
        for member in members.tolist():
            drawn = _drawn(rings, boxes[member].double().numpy(), side)
            targets[member] = torch.from_numpy(drawn)
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


def _drawn(
    rings: list[NDArray[np.float64]], box: NDArray[np.float64], side: int
) -> NDArray[np.uint8]:
    """[M, M] of 0 and 1 from rings [n, 2] and a box [4]."""
    scale = side / np.maximum(box[2:] - box[:2], 1)
    reach = REACH * side
    scaled = [((ring - box[:2]) * scale).clip(-reach, reach).ravel().tolist() for ring in rings]
    # A ring of fewer corners covers nothing, and pycocotools takes four numbers for a box.
    usable = [ring for ring in scaled if len(ring) >= 6]
    if not usable:
        return np.zeros((side, side), np.uint8)
    union = coco_mask.merge(coco_mask.frPyObjects(usable, side, side))
    with warnings.catch_warnings():
        # pycocotools does not yet know the keyword that NumPy 2 passes.
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        drawn: NDArray[np.uint8] = coco_mask.decode(union)
    return drawn
