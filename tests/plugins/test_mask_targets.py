"""Mask targets equal their definition, on every device."""

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from cuda_graphs import replayed
from numpy.typing import NDArray
from torch import Tensor

from maskrcnn_trt.plugins.mask_targets import mask_targets_from_crops

# Masks [B, G, H, W], boxes [B, K, 4] and matched [B, K].
Case = tuple[Tensor, Tensor, Tensor]


def averages_by_definition(
    mask: NDArray[np.uint8], box: NDArray[np.float32], side: int
) -> NDArray[np.float64]:
    """Return RoIAlign of one mask as a product with one sampling matrix per axis."""
    height, width = mask.shape
    down = sampling_matrix(box[1], box[3], height, side)
    across = sampling_matrix(box[0], box[2], width, side)
    averages: NDArray[np.float64] = down @ mask @ across.T
    return averages


def sampling_matrix(near: np.float32, far: np.float32, size: int, side: int) -> NDArray[np.float64]:
    """Return the weight of every pixel in every cell: [M, size]."""
    length = max(far - near, np.float32(1))
    cell = length / side
    samples = int(np.ceil(length / np.float32(side)))
    matrix = np.zeros((side, size))
    for row in range(side):
        positions = near + row * cell + (np.arange(samples) + 0.5) * cell / samples
        positions = positions[(positions >= -1) & (positions <= size)].clip(0, size - 1)
        low = positions.astype(int)
        np.add.at(matrix[row], low, 1 - (positions - low))
        np.add.at(matrix[row], np.minimum(low + 1, size - 1), positions - low)
    return matrix / samples


def targets_by_definition(case: Case, side: int) -> Tensor:
    masks, boxes, matched = (tensor.numpy() for tensor in case)
    targets = np.zeros((*matched.shape, side, side))
    for image, roi in np.ndindex(matched.shape):
        owner, box = matched[image, roi], boxes[image, roi]
        if 0 <= owner < masks.shape[1] and np.isfinite(box).all():
            targets[image, roi] = averages_by_definition(masks[image, owner], box, side)
    return torch.from_numpy(targets).float()


def random_case(shape: tuple[int, int, int, int], rois: int, seed: int, margin: float = 10) -> Case:
    """Return discs and stripes, with boxes that may exceed the masks by a margin."""
    batch, instances, height, width = shape
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    period = torch.randint(3, 30, (batch, instances, 1, 1), generator=generator)
    masks = (((x + 2 * y) % period < period // 2) | (x * x + y * y < period**2)).to(torch.uint8)
    corners = torch.rand(batch, rois, 2, 2, generator=generator).sort(dim=2).values
    boxes = corners * (torch.tensor([width, height]) + 2 * margin) - margin
    matched = torch.randint(0, instances, (batch, rois), generator=generator)
    return masks, boxes.flatten(2), matched


def one_mask(mask: Tensor, boxes: list[list[float]], matched: int = 0) -> Case:
    return mask[None, None], torch.tensor([boxes]), torch.full((1, len(boxes)), matched)


FULL = torch.ones(40, 50, dtype=torch.uint8)
BOXES = [
    [0.0, 0, 50, 40], [-5, -5, 20, 60], [49.5, 39.5, 50, 40], [10, 10, 10, 10], [30, 30, 10, 10],
    [60, 60, 90, 90], [-30, 5, -1.5, 20], [7.25, 3.5, 7.5, 36], [-400, -300, 500, 600],
]  # fmt: skip
ODD = [[torch.nan, 0, 5, 5], [0, torch.inf, 5, 5], [0, 0, 5, -torch.inf], [0, 0, 5, torch.nan]]
CASES: dict[str, Case] = {
    "no image": random_case((0, 3, 9, 9), 4, seed=0),
    "no RoI": random_case((2, 3, 9, 9), 0, seed=0),
    "no instance": (torch.zeros(2, 0, 9, 9).byte(), torch.ones(2, 3, 4), torch.zeros(2, 3).long()),
    "no pixel": (torch.zeros(1, 2, 0, 7).byte(), torch.ones(1, 3, 4), torch.zeros(1, 3).long()),
    "full mask": one_mask(FULL, BOXES),
    "empty mask": one_mask(FULL * 0, BOXES),
    "boxes that are no numbers": one_mask(FULL, ODD),
    "no such instance": one_mask(FULL, BOXES, -1),
    "one instance too far": one_mask(FULL, BOXES, 1),
    "one pixel": one_mask(FULL[:1, :1], BOXES[:4]),
    "one row": random_case((1, 2, 1, 63), 5, seed=1),
    "one column": random_case((1, 2, 63, 1), 5, seed=2),
    "crops": random_case((2, 5, 112, 112), 20, seed=3, margin=30),
    "whole masks": random_case((2, 3, 123, 201), 12, seed=4),
    "far boxes": random_case((2, 3, 30, 41), 12, seed=5, margin=300),
}


def on(device: str, tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.to(device) for tensor in tensors]


@pytest.mark.parametrize("case", CASES)
def test_targets_equal_the_definition(case: str, device: str) -> None:
    side = 14 if case == "far boxes" else 28
    crops = mask_targets_from_crops(*on(device, CASES[case]), side)
    assert crops.dtype == torch.float32
    expected = targets_by_definition(CASES[case], side)
    torch.testing.assert_close(crops.cpu(), expected, atol=3e-5, rtol=0)


def test_opcheck(device: str) -> None:
    for case in ("no RoI", "crops"):
        torch.library.opcheck(mask_targets_from_crops, (*on(device, CASES[case]), 28))


@pytest.mark.parametrize("reach", [1e9, 1e30, 3e38])
def test_too_large_boxes_give_zeros(reach: float, device: str) -> None:
    case = one_mask(FULL, [[-reach, -reach, reach, reach], [10, 10, reach, 30], [0, -reach, 9, 9]])
    assert not mask_targets_from_crops(*on(device, case), 28).any()


@pytest.mark.gpu
def test_huge_boxes_on_a_gpu() -> None:
    case = one_mask(FULL, [[-1e6, -1e6, 1e6, 1e6], [-20, 10, 1e5, 20], [-3e3, 10, 1e4, 20]])
    expected = targets_by_definition(case, 28)[0]
    crops = mask_targets_from_crops(*on("cuda", case), 28)[0]
    torch.testing.assert_close(crops.cpu(), expected, atol=1e-4, rtol=0)


@pytest.mark.gpu
def test_captured_graph_replays_with_other_masks() -> None:
    example, inputs = (random_case((2, 5, 112, 112), 20, seed=seed) for seed in (6, 7))
    (found,) = replayed(lambda *x: [mask_targets_from_crops(*x, 28)], example, inputs)
    torch.testing.assert_close(found, targets_by_definition(inputs, 28), atol=3e-5, rtol=0)


@pytest.mark.gpu
def test_masks_of_another_type_are_rejected_on_a_gpu() -> None:
    masks, boxes, matched = (tensor.cuda() for tensor in CASES["crops"])
    with pytest.raises(ValueError, match=r"masks must be torch\.uint8"):
        mask_targets_from_crops(masks.float(), boxes, matched, 28)
