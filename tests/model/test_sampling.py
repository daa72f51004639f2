import pytest
import torch
from torch import Tensor
from torchvision.models.detection._utils import Matcher
from torchvision.ops import box_iou

from maskrcnn_trt.model.config.schema import RoiConfig, RpnConfig, SamplingConfig
from maskrcnn_trt.model.sampling import match_candidates, random_keys, sample_candidates, take_rows
from maskrcnn_trt.model.targets import Targets

RPN, ROI = RpnConfig().sampling, RoiConfig().sampling


def boxes_near(others: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return boxes that overlap the others by varying amounts."""
    chosen = others[torch.randint(len(others), (count,), generator=generator)]
    return chosen + torch.randn(count, 4, generator=generator) * 3


def padded_targets(boxes: list[Tensor]) -> Targets:
    """Return ground truth of one class, padded with boxes that must not match."""
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
def test_matches_equal_torchvision(config: SamplingConfig, low_quality: bool, shared: bool) -> None:
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


def test_no_match_without_ground_truth_or_overlap() -> None:
    candidates = torch.tensor([[0.0, 0, 50, 50], [60, 60, 90, 90]])
    for truth in (torch.zeros(0, 4), torch.tensor([[500.0, 500, 520, 520]])):
        matches = match_candidates(candidates, padded_targets([truth]), RPN, low_quality=True)
        assert matches.negative.all()
        assert not matches.positive.any()


def test_takes_rows_of_each_image() -> None:
    rows = torch.randn(2, 5, 3, 4)
    indices = torch.tensor([[4, 0, 0], [2, 3, 1]])
    expected = torch.stack([own[chosen] for own, chosen in zip(rows, indices, strict=True)])
    assert torch.equal(take_rows(rows, indices), expected)
    assert torch.equal(take_rows(rows[..., 0, 0], indices), expected[..., 0, 0])
    assert take_rows(rows, indices[:, :0]).shape == (2, 0, 3, 4)


@pytest.mark.parametrize("seed", [0, 1, 2**40, -7])
def test_keys_are_uniform(seed: int) -> None:
    keys = random_keys(torch.tensor([seed]), 100_000, stream=1)[0]
    assert keys.min() >= 0
    assert keys.max() < 1
    # Chi-square with 99 degrees of freedom: beyond 160 once in 10,000 draws.
    counts = torch.histc(keys, 100, 0, 1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 160
    pairs = torch.stack([keys[:-1], keys[1:]])
    assert torch.corrcoef(pairs)[0, 1].abs() < 0.02


def test_keys_of_neighbouring_seeds_and_streams_are_uncorrelated() -> None:
    keys = [random_keys(torch.arange(3), 10_000, stream) for stream in (1, 2)]
    assert (torch.corrcoef(torch.cat(keys)) - torch.eye(6)).abs().max() < 0.05


def test_keys_depend_neither_on_the_batch_nor_on_the_count() -> None:
    alone = random_keys(torch.tensor([42]), 100, stream=1)
    among_others = random_keys(torch.tensor([7, 9, 42]), 250, stream=1)
    assert torch.equal(alone[0], among_others[2, :100])


@pytest.mark.parametrize(
    ("positives", "negatives", "expected"),
    [
        (100, 100, (5, 15)),
        (3, 100, (3, 17)),
        (0, 100, (0, 20)),
        (100, 4, (5, 4)),
        (2, 3, (2, 3)),
        (0, 0, (0, 0)),
    ],
)
def test_share_of_positives_is_limited(
    positives: int, negatives: int, expected: tuple[int, int]
) -> None:
    total = 300
    shuffled = torch.randperm(total, generator=torch.Generator().manual_seed(0))
    positive, negative = torch.zeros(2, 1, total, dtype=torch.bool)
    positive[0, shuffled[:positives]] = True
    negative[0, shuffled[positives : positives + negatives]] = True
    sample = sample_candidates(positive, negative, torch.rand(1, total), 20, 0.25)
    assert sample.indices.shape == (1, 20)
    chosen = sample.indices[sample.chosen]
    assert len(chosen.unique()) == len(chosen) == sum(expected)
    assert int(sample.positive.sum()) == expected[0]
    # The mask loss relies on positives first and padding last.
    assert sample.positive[0, : expected[0]].all()
    assert sample.chosen[0, : sum(expected)].all()
    assert positive[0, chosen[: expected[0]]].all()
    assert negative[0, chosen[expected[0] :]].all()


def test_fewer_candidates_than_the_sample_size() -> None:
    positive = torch.tensor([[True, False, True], [False, False, False]])
    sample = sample_candidates(positive, ~positive, torch.rand(2, 3), 512, 0.25)
    assert sample.indices.shape == (2, 3)
    assert sample.chosen.all()
    assert sample.positive.sum(dim=1).tolist() == [2, 0]


def test_every_candidate_is_equally_likely() -> None:
    draws = 4000
    positive, negative = torch.zeros(2, draws, 10, dtype=torch.bool)
    positive[:, :4] = negative[:, 4:] = True
    sample = sample_candidates(
        positive, negative, random_keys(torch.arange(draws), 10, stream=1), 4, 0.5
    )
    counts = torch.bincount(sample.indices[sample.chosen], minlength=10) / draws
    expected = torch.tensor([2 / 4] * 4 + [2 / 6] * 6)
    torch.testing.assert_close(counts, expected, atol=0.03, rtol=0)
