"""All implementations of `paste_rle` equal the CPU path of serving, for a table of cases."""

import functools
from typing import get_args

import pytest
import torch
from cuda_graphs import replayed
from run_length_cases import pycocotools_strings
from torch import Tensor

from maskrcnn_trt.model.masks import MaskPaste, rles_from_probabilities
from maskrcnn_trt.plugins.paste_rle import paste_rle
from maskrcnn_trt.plugins.run_lengths import coco_strings

RULES = get_args(MaskPaste)
CAPACITY = 8192

# Masks [N, M, M], boxes [N, 4] and sizes [N, 2].
Case = tuple[Tensor, Tensor, Tensor]


def random_masks(count: int, seed: int, side: int = 28) -> Tensor:
    return torch.rand(count, side, side, generator=torch.Generator().manual_seed(seed))


def blobs(count: int, seed: int) -> Tensor:
    """Return mask probabilities like those of a model: one object with a blurred border."""
    y, x = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
    noise = random_masks(count, seed) - 0.5
    return torch.sigmoid((10 - torch.hypot(x - 13.5, y - 13.5)) * 2 + noise)


def random_case(
    count: int, height: int, width: int, seed: int, side: int = 28, margin: int = 20
) -> Case:
    """Return boxes of any size that may exceed the image by a margin."""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(count, 2, 2, generator=generator).sort(dim=1).values
    boxes = corners * (torch.tensor([width, height]) + 2 * margin) - margin
    masks = random_masks(count, seed, side)
    return masks, boxes.flatten(1), torch.tensor([[height, width]]).expand(count, 2).clone()


def one_size(masks: Tensor, boxes: list[list[float]], height: int, width: int) -> Case:
    sizes = torch.tensor([[height, width]]).expand(len(boxes), 2).clone()
    return masks.expand(len(boxes), -1, -1).clone(), torch.tensor(boxes), sizes


def joined(*cases: Case) -> Case:
    masks, boxes, sizes = (torch.cat(tensors) for tensors in zip(*cases, strict=True))
    return masks, boxes, sizes


FULL = torch.ones(1, 28, 28)
BORDERS = [
    [0.0, 0, 50, 40], [0, 0, 25, 40], [25, 0, 50, 40], [0, 0, 50, 20], [0, 20, 50, 40],
    [10, 0, 11, 40], [49, 39, 50, 40], [0, 0, 1, 1], [10.5, 10.5, 30.5, 30.5],
]  # fmt: skip
ODD = [
    [5.0, 5, 5, 20], [0, 0, 0, 0], [50, 40, 50, 40], [7.3, 7.3, 7.3, 7.3], [30, 30, 10, 10],
    [60, 60, 90, 90], [-40, 0, -20, 30], [-1e5, -1e5, 1e5, 1e5], [-1e6, 10, 3, 1e6],
    [1e6, 1e6, 2e6, 2e6],
]  # fmt: skip
CASES: dict[str, Case] = {
    "no mask": (torch.zeros(0, 28, 28), torch.zeros(0, 4), torch.zeros(0, 2, dtype=torch.int64)),
    "full masks at borders": one_size(FULL, BORDERS, 40, 50),
    "empty masks at borders": one_size(FULL * 0, BORDERS, 40, 50),
    "probabilities of just one half": one_size(FULL * 0.5, BORDERS, 40, 50),
    "odd boxes": one_size(FULL, ODD, 40, 50),
    "one pixel": one_size(FULL, [[0.0, 0, 1, 1], [0.2, 0.1, 0.6, 0.9], [0, 0, 0, 0]], 1, 1),
    "one row": random_case(6, 1, 97, seed=1),
    "one column": random_case(6, 97, 1, seed=2),
    "random": random_case(12, 75, 131, seed=3),
    "far outside": random_case(12, 75, 131, seed=4, margin=500),
    "small masks": random_case(6, 61, 40, seed=5, side=14),
    "masks of one sample": random_case(6, 61, 40, seed=6, side=1),
    "many ties": (
        (random_masks(8, 7) * 4).round() / 4,
        random_case(8, 64, 64, 7)[1].round(),
        torch.full((8, 2), 64),
    ),
    "several sizes": joined(*(random_case(2, 9 * n, 70 - 9 * n, seed=n) for n in range(1, 7))),
    "many masks": (blobs(200, 8), *random_case(200, 60, 80, seed=8)[1:]),
    "large image": (blobs(4, 9), *random_case(4, 801, 1333, seed=9)[1:]),
}


@functools.cache
def serving_strings(name: str, paste: MaskPaste) -> list[bytes]:
    """Encode masks by the CPU path of serving, one by one."""
    masks, boxes, sizes = (tensor.numpy() for tensor in CASES[name])
    return [
        rles_from_probabilities(
            masks[n : n + 1], boxes[n : n + 1], *sizes[n].tolist(), paste=paste
        )[0].counts
        for n in range(len(masks))
    ]


def strings(counts: Tensor, num_runs: Tensor) -> list[bytes]:
    return coco_strings(counts.cpu().numpy(), num_runs.cpu().numpy())


@pytest.mark.parametrize("paste", RULES)
@pytest.mark.parametrize("case", CASES)
def test_runs_equal_serving(case: str, paste: MaskPaste, device: str) -> None:
    arguments = [tensor.to(device) for tensor in CASES[case]]
    counts, num_runs = paste_rle(*arguments, CAPACITY, 0.5, paste)
    assert counts.dtype == num_runs.dtype == torch.int32
    assert counts.device.type == device
    assert strings(counts, num_runs) == serving_strings(case, paste)


@pytest.mark.parametrize("capacity", [0, 1, 2, 5, 100])
def test_num_runs_include_runs_beyond_the_capacity(capacity: int, device: str) -> None:
    arguments = [tensor.to(device) for tensor in CASES["random"]]
    all_counts, all_runs = paste_rle(*arguments, CAPACITY)
    counts, num_runs = paste_rle(*arguments, capacity)
    assert int(all_runs.max()) > 100
    assert torch.equal(num_runs, all_runs)
    for own, run_lengths, runs in zip(counts, all_counts, all_runs.tolist(), strict=True):
        assert torch.equal(own[:runs], run_lengths[:runs][:capacity])


@pytest.mark.parametrize("paste", RULES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38, 2.0**24 + 2])
def test_boxes_out_of_range_give_empty_masks(value: float, paste: str, device: str) -> None:
    boxes = torch.tensor([[0.0, 0, 50, 40]]).repeat(4, 1)
    boxes[range(4), range(4)] = value
    masks, sizes = FULL.expand(4, -1, -1), torch.tensor([[40, 50]]).expand(4, 2)
    arguments = [tensor.to(device) for tensor in (masks, boxes, sizes)]
    counts, num_runs = paste_rle(*arguments, 1, 0.5, paste)
    assert num_runs.tolist() == [1] * 4
    assert counts.tolist() == [[2000]] * 4


def test_float16_masks_equal_float32(device: str) -> None:
    masks, boxes, sizes = (tensor.to(device) for tensor in CASES["random"])
    found = paste_rle(masks.half(), boxes, sizes, CAPACITY)
    expected = paste_rle(masks.half().float(), boxes, sizes, CAPACITY)
    assert strings(*found) == strings(*expected)


@pytest.mark.parametrize("paste", RULES)
def test_threshold_is_exclusive(paste: str, device: str) -> None:
    masks, boxes, sizes = (
        tensor.to(device) for tensor in one_size(FULL * 0.25, [[-10.0, -10, 40, 40]], 30, 30)
    )
    for threshold, runs in ((0.25, [900]), (0.24, [0, 900])):
        found = paste_rle(masks, boxes, sizes, 2, threshold, paste)
        assert strings(*found) == pycocotools_strings([runs])


def test_unknown_rule_is_rejected() -> None:
    with pytest.raises(ValueError, match="torchvision or detectron2, not 'bicubic'"):
        paste_rle(*CASES["random"], CAPACITY, 0.5, "bicubic")


@pytest.mark.gpu
def test_captured_graph_replays_with_other_masks() -> None:
    example, inputs = (random_case(12, 75, 131, seed=seed) for seed in (10, 11))
    found = replayed(lambda *tensors: paste_rle(*tensors, CAPACITY), example, inputs)
    assert strings(*found) == strings(*paste_rle(*inputs, CAPACITY))


@pytest.mark.gpu
def test_sizes_that_do_not_fit_are_rejected_on_a_gpu() -> None:
    masks, boxes, sizes = (tensor.cuda() for tensor in CASES["random"])
    with pytest.raises(ValueError, match="boxes must be"):
        paste_rle(masks, boxes[:5], sizes, CAPACITY)
