"""Mask targets from polygons equal pycocotools, on every device."""

import numpy as np
import pytest
import torch
from cuda_graphs import replayed
from numpy.typing import NDArray
from pycocotools import mask as coco_mask
from torch import Tensor

from maskrcnn_trt.plugins.polygon_mask_targets import mask_targets_from_polygons

Ring = NDArray[np.float32]
# Rings [n, 2] of each instance, boxes and matched.
Case = tuple[list[list[Ring]], list[list[float]], list[int]]


def rasterised_by_definition(rings: list[Ring], box: list[float], side: int) -> NDArray[np.uint8]:
    x1, y1, x2, y2 = np.array(box, np.float32).astype(float).tolist()
    x_scale, y_scale = side / max(x2 - x1, 1), side / max(y2 - y1, 1)
    union = np.zeros((side, side), np.uint8)
    for ring in rings:
        if len(ring) >= 3:
            scaled = np.stack([(ring[:, 0] - x1) * x_scale, (ring[:, 1] - y1) * y_scale], axis=1)
            corners = scaled.clip(-100 * side, 100 * side).ravel().tolist()
            union |= coco_mask.decode(coco_mask.frPyObjects([corners], side, side))[..., 0]
    return union


def targets_by_definition(case: Case, side: int) -> Tensor:
    instances, boxes, matched = case
    targets = np.zeros((len(boxes), side, side), np.float32)
    for target, box, owner in zip(targets, boxes, matched, strict=True):
        if 0 <= owner < len(instances) and np.isfinite(box).all():
            rings = [ring.astype(float) for ring in instances[owner]]
            target[:] = rasterised_by_definition(rings, box, side)
    return torch.from_numpy(targets)


def arguments_of(case: Case, device: str = "cpu") -> list[Tensor]:
    """Return the tensors of a case, with padding after the last corner."""
    instances, boxes, matched = case
    rings = [ring for instance in instances for ring in instance]
    padding = np.full((3, 2), 1e9, np.float32)
    arguments = (
        torch.from_numpy(np.concatenate([*rings, padding])),
        torch.tensor([0, *np.cumsum([len(ring) for ring in rings])], dtype=torch.int64),
        torch.tensor([0, *np.cumsum([len(instance) for instance in instances])]).long(),
        torch.tensor(boxes, dtype=torch.float32).view(-1, 4),
        torch.tensor(matched, dtype=torch.int64),
    )
    return [tensor.to(device) for tensor in arguments]


def ring(*corners: float) -> Ring:
    return np.array(corners, np.float32).reshape(-1, 2)


def random_case(instances: int, rois: int, seed: int, corners: int = 12, reach: int = 20) -> Case:
    """Return self-crossing polygons of up to three rings, some with integer or repeated corners."""
    rng = np.random.default_rng(seed)
    outlines = []
    for _ in range(instances):
        rings = []
        for _ in range(rng.integers(1, 4)):
            points = rng.uniform(-reach, 60 + reach, (rng.integers(3, corners), 2))
            if rng.random() < 0.3:
                points = points.round()
            if rng.random() < 0.2:
                points = np.repeat(points, 2, axis=0)
            rings.append(points.astype(np.float32))
        outlines.append(rings)
    boxes = np.sort(rng.uniform(-5, 65, (rois, 2, 2)), axis=1).reshape(rois, 4)
    return outlines, boxes.astype(np.float32).tolist(), rng.integers(0, instances, rois).tolist()


SQUARE = ring(10, 10, 30, 10, 30, 30, 10, 30)
DONUT = [SQUARE, ring(5, 15, 35, 15, 35, 18, 5, 18)]
BOXES = [
    [0.0, 0, 60, 50], [10, 10, 30, 30], [15, 15, 20, 20], [25, 5, 45, 15], [10, 10, 10, 10],
    [30, 30, 10, 10], [40, 40, 60, 60], [-30, -30, -1, -1], [12.3, 9.9, 28.7, 30.2],
    [10.2, 10.2, 10.7, 10.9], [-1e6, -1e6, 1e6, 1e6], [-1e30, -1e30, 1e30, 1e30],
    [1e6, 1e6, 2e6, 2e6],
]  # fmt: skip
ODD = [[np.nan, 0, 5, 5], [0, np.inf, 5, 5], [0, 0, 5, -np.inf], [0, 0, 5, np.nan]]
CASES: dict[str, Case] = {
    "no RoI": ([[SQUARE]], [], []),
    "no instance": ([], BOXES, [0] * len(BOXES)),
    "no ring": ([[], [SQUARE], []], BOXES[:3], [0, 1, 2]),
    "square": ([[SQUARE]], BOXES, [0] * len(BOXES)),
    "several rings": ([[SQUARE], DONUT], BOXES, [1] * len(BOXES)),
    "boxes that are not finite": ([[SQUARE]], ODD, [0] * len(ODD)),
    "no such instance": ([[SQUARE]], BOXES[:2], [-1, 1]),
    "rings of too few corners": (
        [[ring(), ring(10, 10), ring(10, 10, 30, 30), ring(10, 10, 10, 10, 10, 10)]],
        BOXES,
        [0] * len(BOXES),
    ),
    "steep and flat": (
        [[ring(3, 0, 5, 60, 9, 0.5)], [ring(0, 3, 60, 5, 0.5, 9)], [ring(0, 0, 60, 60, 60, 59)]],
        [[0.0, 0, 60, 60]] * 3,
        [0, 1, 2],
    ),
    "crossing itself": ([[ring(0, 0, 60, 50, 60, 0, 0, 50)]], BOXES, [0] * len(BOXES)),
    "random": random_case(20, 60, seed=1),
    "from far away": random_case(20, 60, seed=2, reach=5000),
    "many corners": random_case(4, 12, seed=3, corners=700),
}


@pytest.mark.parametrize("side", [14, 28, 40])
@pytest.mark.parametrize("case", CASES)
def test_targets_equal_pycocotools(case: str, side: int, device: str) -> None:
    targets = mask_targets_from_polygons(*arguments_of(CASES[case], device), side)
    assert targets.dtype == torch.float32
    assert torch.equal(targets.cpu(), targets_by_definition(CASES[case], side))


def test_roi_of_target_size_equals_the_image_mask(device: str) -> None:
    rng = np.random.default_rng(4)
    rings = list(rng.uniform([17, 9], [45, 37], (20, 7, 2)).astype(np.float32))
    case = ([[ring] for ring in rings], [[17.0, 9, 45, 37]] * 20, list(range(20)))
    whole = coco_mask.decode(coco_mask.frPyObjects([r.ravel().tolist() for r in rings], 60, 70))
    targets = mask_targets_from_polygons(*arguments_of(case, device), 28)
    assert targets.sum() > 1000
    np.testing.assert_array_equal(targets.cpu().numpy(), whole[9:37, 17:45].transpose(2, 0, 1))


@pytest.mark.parametrize("case", ["no RoI", "no instance", "several rings"])
def test_opcheck(case: str, device: str) -> None:
    torch.library.opcheck(mask_targets_from_polygons, (*arguments_of(CASES[case], device), 28))


@pytest.mark.gpu
def test_captured_graph_replays_with_other_boxes() -> None:
    outlines, boxes, matched = random_case(20, 60, seed=5)
    example = arguments_of((outlines, boxes[::-1], matched))
    inputs = arguments_of((outlines, boxes, matched))
    (found,) = replayed(lambda *x: [mask_targets_from_polygons(*x, 28)], example, inputs)
    assert torch.equal(found, targets_by_definition((outlines, boxes, matched), 28))


@pytest.mark.gpu
def test_wrong_vertex_shape_is_rejected_on_a_gpu() -> None:
    vertices, *rest = arguments_of(CASES["random"], "cuda")
    with pytest.raises(ValueError, match="vertices must be"):
        mask_targets_from_polygons(vertices.view(-1), *rest, 28)
