import json
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pycocotools import mask as coco_mask
from torchvision.models.detection.roi_heads import paste_masks_in_image

from maskrcnn_trt.model.masks import (
    MaskPaste,
    Rle,
    mask_from_rle,
    rle_from_mask,
    rles_from_probabilities,
)

SHAPES = [(1, 1), (1, 9), (9, 1), (5, 7), (64, 48), (333, 500)]


def coco_counts(mask: NDArray[np.uint8]) -> bytes:
    counts: bytes = coco_mask.encode(np.asfortranarray(mask))["counts"]
    return counts


def pasted_counts(
    masks: NDArray[np.float32], boxes: NDArray[np.float32], height: int, width: int
) -> list[bytes]:
    pasted = paste_masks_in_image(
        torch.from_numpy(masks)[:, None], torch.from_numpy(boxes), (height, width)
    )
    return [coco_counts(mask.numpy().astype(np.uint8)) for mask in pasted[:, 0] > 0.5]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("density", [0.0, 0.02, 0.5, 0.98, 1.0])
def test_rle_equals_pycocotools(shape: tuple[int, int], density: float) -> None:
    mask = (np.random.default_rng(0).random(shape) < density).astype(np.uint8)
    rle = rle_from_mask(mask)
    assert rle == Rle(*shape, coco_counts(mask))
    np.testing.assert_array_equal(mask_from_rle(rle), mask)
    assert rle_from_mask(mask.astype(np.bool_)) == rle


def test_long_runs_survive_coco_json() -> None:
    mask = np.zeros((3000, 2000), np.uint8)
    mask[:, 700:1999] = 1
    mask[0, 0] = mask[17, 3] = 1
    rle = rle_from_mask(mask)
    record = json.loads(json.dumps({"size": [3000, 2000], "counts": rle.counts.decode("ascii")}))
    reference = coco_mask.encode(np.asfortranarray(mask))
    assert coco_mask.area(record) == mask.sum()
    assert coco_mask.iou([record], [reference], [0]) == 1
    np.testing.assert_array_equal(mask_from_rle(rle), mask)


@pytest.mark.parametrize("counts", [b"", b"5", b"`", b"o0o", b"0" * 20])
def test_damaged_runs_are_rejected(counts: bytes) -> None:
    with pytest.raises(ValueError, match=r"mask(?:'s RLE)? (is truncated|do not add up to 4x4)"):
        mask_from_rle(Rle(4, 4, counts))


def random_masks(side: int, seed: int) -> tuple[Any, Any, int, int]:
    """Return probabilities [8, side, side], boxes [8, 4] and the size of an image."""
    rng = np.random.default_rng(seed)
    height, width = (int(n) for n in rng.integers(1, 160, 2))
    boxes = np.sort(rng.uniform(-20, 180, (8, 2, 2)), axis=1).reshape(8, 4).astype(np.float32)
    return rng.random((8, side, side), dtype=np.float32), boxes, height, width


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paste the test's masks in several chunks of columns."""
    monkeypatch.setattr("maskrcnn_trt.model.masks._CHUNK_PIXELS", 300)


random_cases = pytest.mark.parametrize(("side", "seed"), [(14 + n % 2 * 14, n) for n in range(20)])


@random_cases
def test_pasting_equals_torchvision(side: int, seed: int) -> None:
    masks, boxes, height, width = random_masks(side, seed)
    boxes = boxes.clip(0, np.array([width, height] * 2, np.float32))
    rles = rles_from_probabilities(masks, boxes, height, width)
    assert [rle.counts for rle in rles] == pasted_counts(masks, boxes, height, width)


def pasted_as_detectron2(
    masks: NDArray[np.float32], boxes: NDArray[np.float32], height: int, width: int
) -> NDArray[np.float32]:
    """Sample probabilities bilinearly at pixel centres, with zeros outside: [D, H, W]."""
    x1, y1, x2, y2 = torch.from_numpy(boxes.astype(np.float64)).split(1, dim=1)
    x = (torch.arange(width) + 0.5 - x1) / (x2 - x1) * 2 - 1
    y = (torch.arange(height) + 0.5 - y1) / (y2 - y1) * 2 - 1
    shape = (len(boxes), height, width)
    grid = torch.stack([x[:, None, :].expand(shape), y[:, :, None].expand(shape)], dim=3)
    planes = torch.from_numpy(masks.astype(np.float64))[:, None]
    return torch.nn.functional.grid_sample(planes, grid, align_corners=False)[:, 0].numpy()


@random_cases
def test_pasting_equals_detectron2(side: int, seed: int) -> None:
    masks, boxes, height, width = random_masks(side, seed)
    expected = pasted_as_detectron2(masks, boxes, height, width)
    rles = rles_from_probabilities(masks, boxes, height, width, paste="detectron2")
    for rle, probabilities in zip(rles, expected, strict=True):
        clear = np.abs(probabilities - 0.5) > 1e-3
        np.testing.assert_array_equal(mask_from_rle(rle)[clear], probabilities[clear] > 0.5)
        assert clear.mean() > 0.9


def test_pasting_of_full_empty_and_degenerate_boxes() -> None:
    corners = [[0, 0, 50, 40], [0, 0, 0, 0], [50, 40, 50, 40], [10, 0, 20, 40], [0, 10, 50, 20]]
    boxes = np.array(corners, np.float32)
    full = np.ones((5, 28, 28), np.float32)
    assert [r.counts for r in rles_from_probabilities(full, boxes, 40, 50)] == pasted_counts(
        full, boxes, 40, 50
    )
    empty = rles_from_probabilities(np.zeros_like(full), boxes, 40, 50)
    assert {rle.counts for rle in empty} == {coco_counts(np.zeros((40, 50), np.uint8))}


def test_pasting_outside_the_image_and_without_detections() -> None:
    boxes = np.array([[5, 5, 5, 20], [60, 60, 90, 90], [-40, 0, -20, 30]], np.float32)
    full, nothing = np.ones((3, 28, 28), np.float32), coco_counts(np.zeros((40, 50), np.uint8))
    outside: list[tuple[MaskPaste, int]] = [("detectron2", 0), ("torchvision", 1)]
    for paste, first in outside:
        rles = rles_from_probabilities(full[first:], boxes[first:], 40, 50, paste=paste)
        assert {rle.counts for rle in rles} == {nothing}
        assert rles_from_probabilities(full[:0], boxes[:0], 40, 50, paste=paste) == []


def test_threshold_is_exclusive() -> None:
    masks = np.full((1, 28, 28), 0.25, np.float32)
    box = np.array([[-10, -10, 40, 40]], np.float32)
    assert not mask_from_rle(rles_from_probabilities(masks, box, 30, 30, 0.25)[0]).any()
    assert mask_from_rle(rles_from_probabilities(masks, box, 30, 30, 0.24)[0]).all()
