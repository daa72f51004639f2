"""Training and detection with every backbone and normalisation."""

import pytest
import torch
from small_models import ground_truth, noise_images, random_model, small_config


@pytest.mark.parametrize(
    ("name", "features", "norm"),
    [("resnet50", "fpn", "frozen_bn"), ("resnet10", "fpn", "bn"), ("resnet50", "fpn", "gn"),
     ("resnet10", "c4", "bn"), ("resnet10", "c4", "gn"), ("resnet50", "c5", "gn")],
)  # fmt: skip
def test_a_training_step_lowers_the_loss(name: str, features: str, norm: str) -> None:
    model = random_model(small_config(name, features, norm)).train()
    images, sizes = noise_images()
    targets, seeds = ground_truth(), torch.arange(2)
    losses = model(images, sizes, targets, seeds).means()
    losses.sum().backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained.values())
    norm_of_gradient = torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
    assert norm_of_gradient > 0
    torch.optim.SGD(trained.values(), lr=0.01).step()
    with torch.no_grad():
        assert model(images, sizes, targets, seeds).means().sum() < losses.sum()


@torch.inference_mode()
def test_c4_mask_side_is_rounded_up() -> None:
    config = small_config("resnet18", "c4", "frozen_bn", roi={"mask_pool": 7})
    found = random_model(config).eval()(*noise_images())
    assert config.mask_side == found.masks.shape[-1] == 8
