import numpy as np
import pytest
import torch
from box_cases import ODD_BOXES, iou_by_definition, random_boxes
from cuda_graphs import replayed
from torch import Tensor

from maskrcnn_trt.plugins.match_boxes import match_boxes

RPN, ROI = (0.7, 0.3, True), (0.5, 0.5, False)
Rule = tuple[float, float, bool]
Matches = tuple[Tensor, Tensor, Tensor]


def match_by_definition(boxes: Tensor, labels: Tensor, candidates: Tensor, rule: Rule) -> Matches:
    """Match as specified, image by image."""
    foreground, background, low_quality = rule
    foreground, background = np.float32(foreground), np.float32(background)
    shape = len(boxes), candidates.shape[1]
    target = np.zeros(shape, dtype=np.int64)
    positive, negative = np.zeros((2, *shape), dtype=bool)
    for image, own in enumerate(candidates.expand(len(boxes), -1, 4)):
        highest = np.full(shape[1], -1, dtype=np.float32)
        is_best = np.zeros(shape[1], dtype=bool)
        for truth, iou in enumerate(iou_by_definition(boxes[image], own)):
            if labels[image, truth] == 0:
                continue
            target[image][iou > highest] = truth
            highest = np.maximum(highest, iou)
            is_best |= (iou == iou.max(initial=0)) & (iou > 0)
        is_best &= low_quality
        positive[image] = (highest >= foreground) | is_best
        negative[image] = (highest < background) & ~is_best
    return torch.from_numpy(target), torch.from_numpy(positive), torch.from_numpy(negative)


def match_on(
    device: str, boxes: Tensor, labels: Tensor, candidates: Tensor, rule: Rule
) -> list[Tensor]:
    matches = match_boxes(boxes.to(device), labels.to(device), candidates.to(device), *rule)
    return [tensor.cpu() for tensor in matches]


def assert_equal(matches: list[Tensor], expected: Matches) -> None:
    for name, own, wanted in zip(
        ("target", "positive", "negative"), matches, expected, strict=True
    ):
        assert own.dtype == wanted.dtype
        assert torch.equal(own, wanted), name


def random_labels(batch: int, count: int) -> Tensor:
    """Return classes 0 to 2, in which 0 is padding; the last of several images is all padding."""
    labels = torch.randint(0, 3, (batch, count), generator=torch.Generator().manual_seed(3))
    labels[1:][-1:] = 0
    return labels


@pytest.mark.parametrize("rule", [RPN, (0.7, 0.3, False), ROI, (0.6, 0.0, True), (0.0, 0.0, True)])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize(
    ("batch", "truths", "count"),
    [(3, 5, 700), (1, 1, 1), (2, 130, 1500), (1, 400, 300), (2, 0, 50), (2, 4, 0), (0, 3, 9)],
)
def test_equals_the_definition(
    batch: int, truths: int, count: int, shared: bool, rule: Rule, device: str
) -> None:
    boxes, labels = random_boxes(batch, truths, seed=1), random_labels(batch, truths)
    candidates = random_boxes(1 if shared else batch, count, seed=2)
    matches = match_on(device, boxes, labels, candidates, rule)
    assert_equal(matches, match_by_definition(boxes, labels, candidates, rule))


@pytest.mark.parametrize("rule", [RPN, ROI])
def test_degenerate_boxes_match_by_the_definition(rule: Rule, device: str) -> None:
    boxes, labels = ODD_BOXES[None], torch.ones(1, len(ODD_BOXES), dtype=torch.int64)
    candidates = torch.cat([ODD_BOXES.flip(0), random_boxes(200)])[None]
    matches = match_on(device, boxes, labels, candidates, rule)
    assert_equal(matches, match_by_definition(boxes, labels, candidates, rule))


def test_ties_match_the_first_box(device: str) -> None:
    box = torch.tensor([0.0, 0, 10, 10])
    labels = torch.tensor([[0, 3, 3]])
    target, *_ = match_on(device, box.repeat(1, 3, 1), labels, box.repeat(1, 2, 1), RPN)
    assert target.tolist() == [[1, 1]]


@pytest.mark.gpu
@pytest.mark.parametrize("truths", [7, 60, 300])
def test_all_anchors_of_an_image_on_a_gpu(truths: int) -> None:
    generator = torch.Generator().manual_seed(6)
    center = torch.stack(
        torch.meshgrid(torch.arange(0, 800, 4), torch.arange(0, 1344, 4), indexing="xy"), dim=-1
    )
    halves = torch.tensor([[23.0, 11], [16, 16], [11, 23], [180, 90]])
    center = center.reshape(-1, 1, 2)
    anchors = torch.cat([center - halves, center + halves], dim=-1).reshape(1, -1, 4)
    corners = torch.rand(2, truths, 2, generator=generator) * 700
    boxes = torch.cat([corners, corners + torch.rand(2, truths, 2, generator=generator) * 300], 2)
    labels = torch.randint(0, 2, (2, truths), generator=generator)
    matches = match_on("cuda", boxes, labels, anchors, RPN)
    assert_equal(matches, match_boxes(boxes, labels, anchors, *RPN))


@pytest.mark.gpu
def test_wrong_arguments_are_rejected_on_a_gpu() -> None:
    boxes, labels = random_boxes(2, 3).cuda(), torch.ones(2, 3, dtype=torch.int32).cuda()
    with pytest.raises(ValueError, match=r"labels must be torch.int64 of shape \[2, 3\]"):
        match_boxes(boxes, labels, boxes, *RPN)


@pytest.mark.parametrize("rule", [RPN, ROI])
@pytest.mark.parametrize("count", [0, 6])
def test_opcheck(count: int, rule: Rule, device: str) -> None:
    inputs = (random_boxes(2, 4), random_labels(2, 4), random_boxes(1, count))
    torch.library.opcheck(match_boxes, (*(tensor.to(device) for tensor in inputs), *rule))


@pytest.mark.gpu
@pytest.mark.parametrize("rule", [RPN, ROI])
def test_can_be_captured(rule: Rule) -> None:
    example = random_boxes(2, 5), random_labels(2, 5), random_boxes(1, 900)
    inputs = random_boxes(2, 5, seed=8), random_labels(2, 5), random_boxes(1, 900, seed=9)
    matches = replayed(lambda *tensors: match_boxes(*tensors, *rule), example, inputs)
    assert_equal(matches, match_boxes(*inputs, *rule))
