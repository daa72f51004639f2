import math

import pytest
import torch
from box_cases import random_boxes
from cuda_graphs import replayed
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import clip_boxes_to_image, remove_small_boxes

from maskrcnn_trt.plugins.box_deltas import decode_boxes, encode_boxes

WEIGHTS = [(1.0, 1.0), (10.0, 5.0)]
SIZES = torch.tensor([[100, 150], [60, 40], [211, 211]])
# `log` and `exp` of different libraries differ in the last bit: by some thousandths of a pixel if
# a box is enlarged sixtyfold.
TOLERANCE = {"rtol": 1e-5, "atol": 2e-3}


def coder_of(weights: tuple[float, float]) -> BoxCoder:
    center, size = weights
    return BoxCoder((center, center, size, size))


def decode_on(device: str, *arguments: Tensor | float) -> tuple[Tensor, Tensor]:
    moved = [x.to(device) if isinstance(x, Tensor) else x for x in arguments]
    boxes, large = decode_boxes(*moved)
    return boxes.cpu(), large.cpu()


def random_deltas(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, 4, generator=torch.Generator().manual_seed(7)) * scale


def all_of(batch: int, count: int) -> Tensor:
    return torch.arange(count).expand(batch, count)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("shape", [(20,), (2, 300), (0,), (2, 0), (1, 1, 3)])
def test_encoding_equals_torchvision(
    shape: tuple[int, ...], weights: tuple[float, float], device: str
) -> None:
    boxes, references = random_boxes(*shape, seed=1), random_boxes(*shape, seed=2)
    deltas = encode_boxes(boxes.to(device), references.to(device), *weights).cpu()
    assert deltas.shape == boxes.shape
    expected = coder_of(weights).encode_single(boxes.view(-1, 4), references.view(-1, 4))
    torch.testing.assert_close(deltas.view(-1, 4), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("scale", [1.0, 20.0], ids=["usual", "beyond the growth limit"])
def test_decoding_equals_torchvision(
    scale: float, weights: tuple[float, float], device: str
) -> None:
    deltas, references = random_deltas(3, 50, 1, scale=scale), random_boxes(3, 50)
    boxes, large = decode_on(device, deltas, references, all_of(3, 50), SIZES, *weights, False, 5.0)
    for image, size in enumerate(SIZES.tolist()):
        expected = coder_of(weights).decode_single(deltas[image, :, 0], references[image])
        expected = clip_boxes_to_image(expected, tuple(size))
        torch.testing.assert_close(boxes[image], expected, **TOLERANCE)
        kept = remove_small_boxes(boxes[image], 5.0)
        assert large[image].nonzero()[:, 0].tolist() == kept.tolist()


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_indices_select_deltas_and_references(shared: bool, device: str) -> None:
    deltas, references = random_deltas(3, 40, 5), random_boxes(1 if shared else 3, 40)
    indices = torch.randint(-1, 200, (3, 333), generator=torch.Generator().manual_seed(8))
    boxes, large = decode_on(device, deltas, references, indices, SIZES, 1.0, 1.0, False, 1.0)
    coder = coder_of((1.0, 1.0))
    for image, places in enumerate(indices.tolist()):
        for box, is_large, place in zip(boxes[image], large[image], places, strict=True):
            if place < 0:
                assert box.tolist() == [0, 0, 0, 0]
                assert not is_large
                continue
            reference, own = divmod(place, 5)
            expected = coder.decode_single(
                deltas[image, reference, own][None],
                references[0 if shared else image][reference][None],
            )
            expected = clip_boxes_to_image(expected, tuple(SIZES[image].tolist()))
            torch.testing.assert_close(box[None], expected, **TOLERANCE)


def decode_first(device: str, deltas: Tensor, references: Tensor, inclusive: bool, least: float):
    """Decode one delta per reference, with weights of one."""
    batch, count = references.shape[:2]
    indices = all_of(batch, count)
    return decode_on(device, deltas, references, indices, SIZES[:batch], 1.0, 1.0, inclusive, least)


def test_inclusive_boxes_keep_the_border_pixel(device: str) -> None:
    references = torch.tensor([[[-30.0, 10, -20, 20], [300, 10, 340, 20], [10, 10, 20, 20]]])
    boxes, large = decode_first(device, torch.zeros(1, 3, 1, 4), references, True, 0.0)
    assert boxes.tolist() == [[[0, 10, 1, 20], [149, 10, 150, 20], [10, 10, 20, 20]]]
    assert large.all()


def test_empty_and_undefined_boxes_are_never_large(device: str) -> None:
    outside, inside = [-30.0, 10, -20, 20], [10.0, 10, 20, 20]
    references = torch.tensor([[outside, inside, inside, inside]])
    deltas = torch.zeros(1, 4, 1, 4)
    deltas[0, 1, 0, 2], deltas[0, 2, 0, 0], deltas[0, 3, 0, 3] = -math.inf, math.nan, math.nan
    boxes, large = decode_first(device, deltas, references, False, 0.0)
    assert not large.any()
    assert boxes.isnan().sum(dim=-1).tolist() == [[0, 0, 2, 2]]
    for batch, count in ((2, 0), (0, 2)):
        boxes, large = decode_first(
            device, torch.zeros(batch, count, 1, 4), torch.zeros(batch, count, 4), False, 1.0
        )
        assert (boxes.shape, large.shape) == ((batch, count, 4), (batch, count))


@pytest.mark.gpu
def test_wrong_arguments_are_rejected_on_a_gpu() -> None:
    boxes = random_boxes(4).cuda()
    with pytest.raises(ValueError, match=r"references must be torch.float32 of shape \[4, 4\]"):
        encode_boxes(boxes, boxes[:3], 1.0, 1.0)
    with pytest.raises(ValueError, match=r"image_sizes must be torch.int64 of shape \[3, 2\]"):
        decode_on(
            "cuda", random_deltas(3, 4, 1), random_boxes(3, 4), all_of(3, 4), SIZES.float(),
            1.0, 1.0, False, 1.0,
        )  # fmt: skip


def test_opcheck(device: str) -> None:
    boxes = random_boxes(2, 5).to(device)
    torch.library.opcheck(encode_boxes, (boxes, boxes, 1.0, 1.0))
    deltas, indices, sizes = random_deltas(2, 5, 3), all_of(2, 4).contiguous(), SIZES[:2]
    tensors = (deltas.to(device), boxes[:1], indices.to(device), sizes.to(device))
    torch.library.opcheck(decode_boxes, (*tensors, 10.0, 5.0, False, 1.0))


@pytest.mark.gpu
def test_can_be_captured() -> None:
    def round_trip(
        boxes: Tensor, references: Tensor, indices: Tensor, sizes: Tensor
    ) -> tuple[Tensor, ...]:
        deltas = encode_boxes(boxes, references, 1.0, 1.0)
        return decode_boxes(deltas[:, :, None], references, indices, sizes, 1.0, 1.0, False, 1.0)

    example = random_boxes(3, 9), random_boxes(3, 9, seed=1), all_of(3, 9), SIZES
    indices = all_of(3, 9).flip(1)
    inputs = random_boxes(3, 9, seed=2), random_boxes(3, 9, seed=3), indices, SIZES.flip(0) + 200
    boxes, large = replayed(round_trip, example, inputs)
    torch.testing.assert_close(boxes, inputs[0].flip(1), **TOLERANCE)
    assert large.all()
