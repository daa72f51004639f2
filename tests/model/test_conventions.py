"""Detections under the conventions of other implementations equal plain reimplementations.

`reference_detections` handles one image, level and class at a time. If `plus_one` is 1, boxes
include the pixels of their far edges.
"""

import math

import pytest
import torch
from reference_boxes import clip, decode, pool
from small_models import CONVENTIONS, noise_images, random_model, small_config
from torch import Tensor

from maskrcnn_trt.model.anchors import cell_anchors, grid_steps
from maskrcnn_trt.model.config.schema import AnchorConfig
from maskrcnn_trt.model.mask_rcnn import MaskRCNN


def test_legacy_anchors_are_those_of_faster_rcnn() -> None:
    """Expected values are those in py-faster-rcnn's generate_anchors.py, far edges inclusive."""
    config = AnchorConfig(sizes=(128, 256, 512), convention="legacy")
    expected = [
        [-84, -40, 99, 55], [-176, -88, 191, 103], [-360, -184, 375, 199],
        [-56, -56, 71, 71], [-120, -120, 135, 135], [-248, -248, 263, 263],
        [-36, -80, 51, 95], [-80, -168, 95, 183], [-168, -344, 183, 359],
    ]  # fmt: skip
    (anchors,) = cell_anchors(config, (16,))
    assert torch.equal(anchors, torch.tensor(expected) + torch.tensor([0.0, 0, 1, 1]))


def test_detectron2_anchors_are_not_rounded_and_ordered_by_size() -> None:
    config = AnchorConfig(sizes=(32, 50), aspect_ratios=(0.5, 2.0), convention="detectron2")
    (anchors,) = cell_anchors(config, (16,))
    sides = [(size / math.sqrt(r), size * math.sqrt(r)) for size in (32, 50) for r in (0.5, 2.0)]
    expected = torch.tensor([[-w / 2, -h / 2, w / 2, h / 2] for w, h in sides])
    torch.testing.assert_close(anchors, expected)
    assert grid_steps(config, (16,), (100, 100), [(6, 6)]) == [(16, 16)]


@pytest.mark.parametrize("features", ["fpn", "c4", "c5"])
@pytest.mark.parametrize("convention", CONVENTIONS)
@torch.inference_mode()
def test_detections_equal_the_reference(convention: str, features: str) -> None:
    name = "resnet50" if features == "c5" else "resnet10"
    config = small_config(name, features, "frozen_bn", **CONVENTIONS[convention])
    model = random_model(config).eval()
    images, sizes = noise_images()
    found = model(images, sizes)
    plus_one = int(config.inclusive_boxes)
    assert found.num_detections.min() > 0
    assert found.masks.shape == (2, 10, config.mask_side, config.mask_side)
    for index, (height, width) in enumerate(sizes.tolist()):
        blank = torch.zeros_like(images[index : index + 1])
        blank[:, :, :height, :width] = images[index : index + 1, :, :height, :width]
        maps = model._features(blank, sizes[index : index + 1])
        boxes, scores, labels, masks = reference_detections(model, maps, height, width, plus_one)
        count = int(found.num_detections[index])
        assert count == len(boxes)
        assert found.labels[index, :count].tolist() == labels.tolist()
        far = torch.tensor([0, 0, plus_one, plus_one])
        torch.testing.assert_close(found.boxes[index, :count], boxes + far, atol=1e-3, rtol=0)
        torch.testing.assert_close(found.scores[index, :count], scores, atol=1e-5, rtol=0)
        torch.testing.assert_close(found.masks[index, :count], masks, atol=1e-4, rtol=0)


def reference_detections(
    model: MaskRCNN, maps: list[Tensor], height: int, width: int, plus_one: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return boxes [K, 4] in the convention's form, scores [K], labels [K], masks [K, M, M]."""
    config = model.config
    proposals = reference_proposals(model, maps, height, width, plus_one)
    heads = model.roi_heads
    sampling = config.roi.sampling_ratio or -1, config.roi.aligned
    pooled = pool(maps, proposals, config.roi.box_pool, *sampling, plus_one)
    logits, deltas = heads.box_predictor(heads.box_head(heads.shared_head(pooled)))
    probabilities = logits.softmax(dim=1)
    candidates = []
    for label in range(1, config.num_classes + 1):
        own = deltas[:, 4 * label : 4 * label + 4] / torch.tensor([10.0, 10, 5, 5])
        boxes = clip(decode(own, proposals, plus_one), height, width, plus_one)
        scores = probabilities[:, label]
        chosen = (scores > config.roi.score_threshold).nonzero()[:, 0]
        kept = chosen[nms(boxes[chosen], scores[chosen], config.roi.nms_iou, plus_one)]
        candidates += [(float(scores[i]), label, boxes[i]) for i in kept.tolist()]
    candidates.sort(key=lambda candidate: -candidate[0])
    best = candidates[: config.roi.max_detections]
    boxes = torch.stack([box for _, _, box in best])
    labels = torch.tensor([label for _, label, _ in best])
    pooled = pool(maps, boxes, config.roi.mask_pool, *sampling, plus_one)
    hidden = heads.mask_head(heads.shared_head(pooled))
    predictor = heads.mask_predictor
    logits = predictor.mask_fcn_logits(predictor.conv5_mask(hidden).relu())
    masks = logits[torch.arange(len(labels)), labels].sigmoid()
    return boxes, torch.tensor([score for score, _, _ in best]), labels, masks


def reference_proposals(
    model: MaskRCNN, maps: list[Tensor], height: int, width: int, plus_one: int
) -> Tensor:
    config, strides = model.config, (4, 8, 16, 32, 64) if len(maps) > 1 else (16,)
    grids = [tuple(m.shape[2:]) for m in maps]
    cells = cell_anchors(config.anchors, strides)
    anchors = [
        torch.stack(
            [
                torch.tensor([x, y, x, y]) * stride + cell
                for y in range(rows)
                for x in range(columns)
                for cell in own
            ]
        )
        for own, stride, (rows, columns) in zip(cells, strides, grids, strict=True)
    ]
    found = []
    for own, logits, deltas in zip(anchors, *model.rpn.head(maps), strict=True):
        own = own - torch.tensor([0, 0, plus_one, plus_one])
        scores = logits[0].permute(1, 2, 0).flatten()
        deltas = deltas[0].permute(1, 2, 0).reshape(-1, 4)
        top = scores.sort(descending=True, stable=True).indices[: config.rpn.pre_nms_top_n_test]
        boxes = clip(decode(deltas[top], own[top], plus_one), height, width, plus_one)
        sides = boxes[:, 2:] - boxes[:, :2] + plus_one
        top, boxes = (x[(sides > 0).all(dim=1)] for x in (top, boxes))
        kept = nms(boxes, scores[top], config.rpn.nms_iou, plus_one)
        found += [(float(scores[top[i]]), boxes[i]) for i in kept.tolist()]
    found.sort(key=lambda candidate: -candidate[0])
    return torch.stack([box for _, box in found[: config.rpn.post_nms_top_n_test]])


def nms(boxes: Tensor, scores: Tensor, threshold: float, plus_one: int) -> Tensor:
    """Return the indices of kept boxes, best first."""
    kept: list[int] = []
    for i in scores.sort(descending=True, stable=True).indices.tolist():
        if all(iou(boxes[i].tolist(), boxes[j].tolist(), plus_one) <= threshold for j in kept):
            kept.append(i)
    return torch.tensor(kept, dtype=torch.int64)


def iou(first: list[float], second: list[float], plus_one: int) -> float:
    def area(x1: float, y1: float, x2: float, y2: float) -> float:
        return max(x2 - x1 + plus_one, 0) * max(y2 - y1 + plus_one, 0)

    shared = area(*map(max, first[:2], second[:2]), *map(min, first[2:], second[2:]))
    return shared / (area(*first) + area(*second) - shared)
