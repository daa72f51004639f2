"""Invariants of the whole model, for any weights."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from small_models import assert_same
from torch import Tensor

from maskrcnn_trt.model.checkpoint import load_checkpoint
from maskrcnn_trt.model.config.schema import BackboneConfig, ModelConfig, RoiConfig
from maskrcnn_trt.model.mask_rcnn import BatchDetections, MaskRCNN
from maskrcnn_trt.model.targets import Targets

SIZES = torch.tensor([[96, 160], [64, 100], [33, 128]])


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> MaskRCNN:
    return load_checkpoint(tiny_checkpoint).build_model()


def image_batch() -> Tensor:
    """Return [3, 3, 96, 160] uint8 noise, also in the padding."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(3, 3, 6, 10, generator=generator) * 255
    return torch.nn.functional.interpolate(coarse, (96, 160), mode="bilinear").to(torch.uint8)


def ground_truth(counts: tuple[int, ...]) -> Targets:
    """Return the given number of 40 pixel squares per image, padded to four."""
    boxes = torch.zeros(len(counts), 4, 4)
    labels = torch.zeros(len(counts), 4, dtype=torch.int64)
    masks = torch.zeros(len(counts), 4, 96, 160, dtype=torch.uint8)
    for index, count in enumerate(counts):
        for row in range(count):
            x, y = 15 * row, 5 * row
            boxes[index, row] = torch.tensor([x, y, x + 40, y + 40])
            labels[index, row] = 1 + row % 3
            masks[index, row, y : y + 40, x : x + 40] = 1
    return Targets(boxes, labels, masks)


@torch.inference_mode()
def test_padding_is_ignored(model: MaskRCNN) -> None:
    images, blank = image_batch(), image_batch()
    for image, (height, width) in zip(blank, SIZES.tolist(), strict=True):
        image[:, height:] = 0
        image[:, :, width:] = 0
    assert not torch.equal(images, blank)
    for found, expected in zip(model(images, SIZES), model(blank, SIZES), strict=True):
        assert torch.equal(found, expected)


@torch.inference_mode()
def test_uint8_equals_float(model: MaskRCNN) -> None:
    images = image_batch()
    for found, expected in zip(model(images.float(), SIZES), model(images, SIZES), strict=True):
        assert torch.equal(found, expected)


@torch.inference_mode()
def test_batch_neighbours_do_not_matter(model: MaskRCNN) -> None:
    images = image_batch()
    alone = [model(images[i : i + 1], SIZES[i : i + 1]) for i in range(3)]
    expected = BatchDetections(*(torch.cat(parts) for parts in zip(*alone, strict=True)))
    assert expected.num_detections.min() > 0
    assert_same(model(images, SIZES), expected)


@torch.inference_mode()
def test_channels_last_gives_the_same_detections(model: MaskRCNN, tiny_checkpoint: Path) -> None:
    images = image_batch()
    last = load_checkpoint(tiny_checkpoint).build_model().to(memory_format=torch.channels_last)
    assert_same(last(images, SIZES), model(images, SIZES))


@torch.inference_mode()
def test_boxes_lie_in_their_image_and_rows_beyond_the_count_are_zero(model: MaskRCNN) -> None:
    found = model(image_batch(), SIZES)
    assert (found.boxes >= 0).all()
    assert (found.boxes[..., 2:] <= SIZES.flip(1)[:, None]).all()
    assert (found.scores.diff() <= 0).all()
    for index, count in enumerate(found.num_detections.tolist()):
        assert (found.scores[index, :count] > model.config.roi.score_threshold).all()
        assert all(not part[index, count:].any() for part in found[1:])


@torch.inference_mode()
def test_no_detections(model: MaskRCNN) -> None:
    roi = model.config.roi.model_copy(update={"score_threshold": 1.0})
    strict = MaskRCNN(model.config.model_copy(update={"roi": roi})).eval()
    strict.load_state_dict(model.state_dict())
    found = strict(image_batch(), SIZES)
    shapes = [(3,), (3, 20, 4), (3, 20), (3, 20), (3, 20, 28, 28)]
    assert [tuple(part.shape) for part in found] == shapes
    assert not any(part.any() for part in found)


@torch.inference_mode()
def test_fewer_candidates_than_detections(model: MaskRCNN) -> None:
    roi = model.config.roi.model_copy(update={"nms_candidates": 15})
    few = MaskRCNN(model.config.model_copy(update={"roi": roi})).eval()
    few.load_state_dict(model.state_dict())
    found = few(image_batch(), SIZES)
    assert 0 < found.num_detections.min() <= found.num_detections.max() <= 15
    assert found.masks.shape == (3, 20, 28, 28)
    assert not any(part[:, 15:].any() for part in found[1:])


@pytest.mark.parametrize(
    ("norm", "counts"),
    [("frozen_bn", (4, 0, 1)), ("frozen_bn", (0, 0, 0)), ("bn", (4, 0, 1)), ("gn", (0, 0, 0))],
)
def test_losses_and_gradients_are_finite(
    model: MaskRCNN, norm: Literal["frozen_bn", "bn", "gn"], counts: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    backbone = model.config.backbone.model_copy(update={"norm": norm, "frozen_stages": 1})
    fresh = MaskRCNN(model.config.model_copy(update={"backbone": backbone})).train()
    terms = fresh(image_batch(), SIZES, ground_truth(counts), torch.arange(3))
    assert terms.means().isfinite().all()
    # Without ground truth, box and mask losses are zero.
    assert (terms.means()[[1, 3, 4]] > 0).tolist() == [any(counts)] * 3
    terms.means().sum().backward()
    for name, parameter in fresh.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


def test_rpn_has_gradients_under_autocast(model: MaskRCNN) -> None:
    """Autocast caches rounded weights when the RPN head runs without gradients first."""
    fresh = MaskRCNN(model.config).train()
    with torch.autocast("cpu", torch.bfloat16):
        terms = fresh(image_batch(), SIZES, ground_truth((4, 2, 3)), torch.arange(3))
    terms.means().sum().backward()
    for name, parameter in fresh.rpn.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


def test_losses_of_an_image_do_not_depend_on_its_neighbours(model: MaskRCNN) -> None:
    images, targets, seeds = image_batch(), ground_truth((4, 0, 1)), torch.tensor([5, 6, 7])
    whole = model(images, SIZES, targets, seeds)
    alone = [
        model(images[own], SIZES[own], Targets(*(part[own] for part in targets)), seeds[own])
        for own in ([0], [1], [2])
    ]
    for together, parts in zip(whole, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(together, sum(parts), atol=1e-3, rtol=1e-4)


def test_gradients_are_reproducible_with_several_threads() -> None:
    """PyTorch uses several threads for large gradients, such as those of this model."""
    torch.manual_seed(0)
    config = ModelConfig(
        num_classes=3,
        backbone=BackboneConfig(name="resnet10"),
        roi=RoiConfig(mask_head_depth=1, box_head_dim=64, mask_pool=7),
    )
    model = MaskRCNN(config).train()
    batch = image_batch(), SIZES, ground_truth((4, 2, 3)), torch.arange(3)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        first, second = (
            torch.autograd.grad(
                model.losses(*batch).means().sum(),
                [x for x in model.parameters() if x.requires_grad],
            )
            for _ in range(2)
        )
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, first, second))


def test_losses_need_seeds(model: MaskRCNN) -> None:
    with pytest.raises(ValueError, match=r"losses need .*`seeds`"):
        model(image_batch(), SIZES, ground_truth((1, 1, 1)))
