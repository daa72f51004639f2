import pytest
import torch
from torch import Tensor
from torchvision.models.detection._utils import Matcher
from torchvision.ops import box_iou

from maskrcnn_trt.model.config import RoiConfig, RpnConfig, SamplingConfig
from maskrcnn_trt.model.matching import match_candidates
from maskrcnn_trt.model.targets import Targets

RPN, ROI = RpnConfig().sampling, RoiConfig().sampling


def boxes_near(others: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Boxes that overlap the others to all degrees."""
    chosen = others[torch.randint(len(others), (count,), generator=generator)]
    return chosen + torch.randn(count, 4, generator=generator) * 3


def padded_targets(boxes: list[Tensor]) -> Targets:
    """Ground truth of one class, padded with boxes that must match nothing."""
    width = max(map(len, boxes)) + 2
    padded = torch.tensor([0.0, 0, 100, 100]).repeat(len(boxes), width, 1)
    labels = torch.zeros(len(boxes), width, dtype=torch.int64)
    for index, own in enumerate(boxes):
        padded[index, : len(own)] = own
        labels[index, : len(own)] = 1
    return Targets(padded, labels, torch.zeros(len(boxes), width, 1, 1, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("config", "low_quality"),
    [(RPN, True), (RPN, False), (ROI, False)],
    ids=["rpn", "rpn-thresholds-only", "roi"],
)
@pytest.mark.parametrize("shared", [True, False], ids=["anchors", "proposals"])
def test_matches_equal_torchvisions(
    config: SamplingConfig, low_quality: bool, shared: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(9, 2, generator=generator) * 150
    truth = torch.cat([corners, corners + 30], dim=1)
    lists = [truth[:5], truth[5:6], truth[6:]]
    sets = [boxes_near(truth, 80, generator) for _ in lists]
    if shared:
        sets = sets[:1] * len(lists)
    candidates = sets[0] if shared else torch.stack(sets)
    matches = match_candidates(candidates, padded_targets(lists), config, low_quality=low_quality)
    matcher = Matcher(config.foreground_iou, config.background_iou, low_quality)
    for index, (own, boxes) in enumerate(zip(lists, sets, strict=True)):
        expected = matcher(box_iou(own, boxes))
        positive = expected >= 0
        assert positive.any()
        assert torch.equal(matches.positive[index], positive)
        assert torch.equal(matches.negative[index], expected == Matcher.BELOW_LOW_THRESHOLD)
        assert torch.equal(matches.target[index][positive], expected[positive])


def test_image_without_ground_truth_has_only_negatives() -> None:
    candidates = torch.tensor([[0.0, 0, 100, 100], [5, 5, 20, 20]])
    matches = match_candidates(
        candidates, padded_targets([torch.zeros(0, 4)]), RPN, low_quality=True
    )
    assert matches.negative.all()
    assert not matches.positive.any()


def test_box_that_no_candidate_touches_has_no_match() -> None:
    targets = padded_targets([torch.tensor([[500.0, 500, 520, 520]])])
    candidates = torch.tensor([[0.0, 0, 50, 50], [60, 60, 90, 90]])
    assert not match_candidates(candidates, targets, RPN, low_quality=True).positive.any()
