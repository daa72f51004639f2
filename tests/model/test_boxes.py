import math

import pytest
import torch
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import boxes as torchvision_boxes

from maskrcnn_trt.model.boxes import (
    DeltaWeights,
    box_area,
    boxes_from_deltas,
    clip_boxes,
    deltas_from_boxes,
    larger_than,
    pairwise_iou,
)

WEIGHTS = [DeltaWeights(1.0, 1.0), DeltaWeights(10.0, 5.0)]


def random_boxes(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(count, 2, generator=generator) * 200 - 20
    return torch.cat([corners, corners + 1 + torch.rand(count, 2, generator=generator) * 80], 1)


@pytest.mark.parametrize(("rows", "columns"), [(7, 11), (0, 4), (3, 0)])
def test_iou_equals_torchvisions(rows: int, columns: int) -> None:
    boxes, others = random_boxes(rows, 0), random_boxes(columns, 1)
    torch.testing.assert_close(
        pairwise_iou(boxes, others), torchvision_boxes.box_iou(boxes, others)
    )


def test_iou_of_a_batch_is_that_of_its_images() -> None:
    boxes, others = random_boxes(6, 0).view(2, 3, 4), random_boxes(10, 1).view(2, 5, 4)
    expected = torch.stack([pairwise_iou(*pair) for pair in zip(boxes, others, strict=True)])
    assert torch.equal(pairwise_iou(boxes, others), expected)
    assert torch.equal(pairwise_iou(boxes, others[0])[1], pairwise_iou(boxes[1], others[0]))


def test_iou_of_empty_boxes_is_zero() -> None:
    point, square = torch.tensor([[3.0, 3, 3, 3]]), torch.tensor([[0.0, 0, 9, 9]])
    assert pairwise_iou(point, torch.cat([point, square])).tolist() == [[0.0, 0.0]]


def test_area_equals_torchvisions() -> None:
    boxes = random_boxes(9, 2)
    assert torch.equal(box_area(boxes), torchvision_boxes.box_area(boxes))


def test_clips_to_the_own_image() -> None:
    boxes = random_boxes(12, 3).view(2, 6, 4)
    sizes = torch.tensor([[100, 150], [60, 40]])
    for clipped, own, size in zip(clip_boxes(boxes, sizes), boxes, sizes.tolist(), strict=True):
        assert torch.equal(clipped, torchvision_boxes.clip_boxes_to_image(own, tuple(size)))


def test_larger_than_agrees_with_torchvision() -> None:
    boxes = torch.tensor([[0.0, 0, 5, 5], [0, 0, 4.9, 9], [0, 0, 9, 4.9], [2, 2, 7, 80]])
    kept = larger_than(boxes, 5.0).nonzero()[:, 0]
    assert kept.tolist() == torchvision_boxes.remove_small_boxes(boxes, 5.0).tolist() == [0, 3]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_deltas_equal_torchvisions(weights: DeltaWeights) -> None:
    coder = BoxCoder((weights.center, weights.center, weights.size, weights.size))
    boxes, references = random_boxes(20, 4), random_boxes(20, 5)
    deltas = deltas_from_boxes(boxes, references, weights)
    torch.testing.assert_close(deltas, coder.encode_single(boxes, references))
    torch.testing.assert_close(
        boxes_from_deltas(deltas, references, weights), boxes, atol=1e-3, rtol=0
    )


@pytest.mark.parametrize("weights", WEIGHTS)
def test_decoding_equals_torchvisions_growth_limit_included(weights: DeltaWeights) -> None:
    coder = BoxCoder((weights.center, weights.center, weights.size, weights.size))
    references = random_boxes(50, 6)
    deltas = torch.randn(50, 4, generator=torch.Generator().manual_seed(7)) * 20
    boxes = boxes_from_deltas(deltas, references, weights)
    torch.testing.assert_close(boxes, coder.decode_single(deltas, references))
    growth = (boxes[:, 2:] - boxes[:, :2]) / (references[:, 2:] - references[:, :2])
    assert math.isclose(float(growth.max()), 1000 / 16, rel_tol=1e-3)
