import copy

import pytest
import torch
from torch import Tensor, nn

from maskrcnn_trt.model.batch_norm import RoiBatchNorm2d
from maskrcnn_trt.model.config.schema import ModelConfig
from maskrcnn_trt.model.mask_rcnn import MaskRCNN
from maskrcnn_trt.model.targets import Targets

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _forward_and_backward(norm: nn.BatchNorm2d, maps: Tensor, *chosen: Tensor) -> list[Tensor]:
    """Return the output, the gradient of the input, and the parameters' gradients and buffers."""
    maps = maps.clone().requires_grad_()
    output = norm(maps, *chosen)
    torch.sin(output[chosen[0].flatten()] if chosen else output).sum().backward()
    gradients = [norm.weight.grad, norm.bias.grad]
    return [output.detach(), maps.grad, *gradients, *norm.buffers()]  # type: ignore[list-item]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("share", [0.3, 1.0])
@pytest.mark.parametrize("device", DEVICES)
def test_statistics_are_those_of_the_chosen_rois(
    layout: torch.memory_format, share: float, device: str
) -> None:
    torch.manual_seed(0)
    maps = torch.randn(12, 5, 3, 4).mul_(3).add_(1).to(device, memory_format=layout)
    chosen = (torch.rand(3, 4) <= share).to(device)
    norm, reference = RoiBatchNorm2d(5).to(device), nn.BatchNorm2d(5).to(device)
    for layer in (norm, reference):
        nn.init.constant_(layer.weight, 1.5)
        nn.init.constant_(layer.bias, 0.5)
    rows = chosen.flatten()
    output, gradient, *others = _forward_and_backward(norm, maps, chosen)
    expected, expected_gradient, *expected_others = _forward_and_backward(reference, maps[rows])
    torch.testing.assert_close(output[rows], expected)
    torch.testing.assert_close(gradient[rows], expected_gradient)
    assert not gradient[~rows].any()
    torch.testing.assert_close(others, expected_others)
    norm.eval()
    reference.eval()
    torch.testing.assert_close(norm(maps, chosen), reference(maps))


def test_without_a_chosen_roi_all_are_used() -> None:
    maps = torch.randn(4, 2, 3, 3)
    norm, reference = RoiBatchNorm2d(2), nn.BatchNorm2d(2)
    chosen = torch.zeros(2, 2, dtype=torch.bool)
    torch.testing.assert_close(norm(maps, chosen), reference(maps))
    assert norm(maps.half(), chosen).dtype == torch.float16


def test_the_mask_loss_depends_on_positive_rois_only() -> None:
    torch.manual_seed(0)
    config = ModelConfig.model_validate({
        "num_classes": 3,
        "backbone": {"name": "resnet10", "norm": "frozen_bn", "fpn_channels": 32},
        "roi": {
            "head_norm": "bn", "box_head_convs": 1, "box_head_dim": 32, "mask_head_dim": 16,
            "mask_crop_size": None, "sampling": {"batch_size_per_image": 64},
        },
    })  # fmt: skip
    model = MaskRCNN(config).train()
    size = 128, 160
    boxes = torch.tensor([[[20.0, 30, 120, 100]], [[60.0, 20, 150, 120]]])
    masks = torch.zeros(2, 1, *size, dtype=torch.uint8)
    masks[0, 0, 30:100, 20:90] = masks[1, 0, 20:120, 60:100] = 1
    targets = Targets(boxes, torch.tensor([[1], [2]]), masks)
    images = torch.rand(2, 3, *size) * 255
    seeds = torch.tensor([1, 2])
    sample = model.sample(images, torch.tensor([size] * 2), targets, seeds)
    rois = sample.rois
    assert 0 < rois.positive.sum() < rois.positive.numel()
    moved = rois._replace(
        boxes=torch.where(rois.positive[..., None], rois.boxes, torch.tensor([0.0, 0, 9, 9]))
    )
    heads = [copy.deepcopy(model.roi_heads) for _ in range(2)]
    losses = [
        head.losses(sample.features, own, targets)
        for head, own in zip(heads, (rois, moved), strict=True)
    ]
    torch.testing.assert_close(losses[0][2], losses[1][2])
    assert not torch.isclose(losses[0][0], losses[1][0])
    statistics, moved_statistics = (list(head.mask_head.buffers()) for head in heads)
    torch.testing.assert_close(statistics, moved_statistics)
