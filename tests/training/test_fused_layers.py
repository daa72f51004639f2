from copy import deepcopy

import pytest
import torch
from torch import Tensor

from maskrcnn_trt.model.config.schema import BackboneConfig, ModelConfig
from maskrcnn_trt.model.mask_rcnn import MaskRCNN
from maskrcnn_trt.training.fused_layers import fuse_layers


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("features", ["fpn", "c4"])
def test_fused_layers_are_as_accurate_as_separate_ones(features: str, device: str) -> None:
    """Gradients of all layers in bf16 differ from those in fp32 as much as without fusion."""
    torch.manual_seed(0)
    backbone = BackboneConfig(features=features, frozen_stages=1)
    model = MaskRCNN(ModelConfig(num_classes=3, backbone=backbone)).to(device).train()
    for name, buffer in model.named_buffers():
        if "running_var" in name:
            buffer.add_(torch.rand_like(buffer) / 4)
    fused = deepcopy(model)
    fuse_layers(fused)
    exact = gradients(model, autocast=False)
    for mine, wanted in zip(gradients(fused, autocast=False), exact, strict=True):
        # Convolutions on a GPU add in no fixed order.
        assert (mine - wanted).norm() <= 1e-5 * wanted.norm()
    errors = [
        torch.stack([(a - b).norm() / b.norm() for a, b in zip(rounded, exact, strict=True)])
        for rounded in (gradients(fused, autocast=True), gradients(model, autocast=True))
    ]
    assert 0 < errors[0].mean() < 1.2 * errors[1].mean() < 0.3


def gradients(model: MaskRCNN, autocast: bool) -> list[Tensor]:
    device = model.pixel_mean.device
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (1, 3, 64, 96), dtype=torch.uint8, generator=generator)
    sizes = torch.tensor([[60, 96]])
    # By default, cuDNN rounds the inputs of float32 convolutions to TF32.
    exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    rounded = torch.autocast(device.type, torch.bfloat16, enabled=autocast)
    with exact:
        with rounded:
            maps = model._features(images.to(device), sizes.to(device))
            logits, _ = model.rpn.head(maps)
        loss = sum(x.float().square().mean() for x in (*maps, *logits))
        trained = [p for p in model.backbone.parameters() if p.requires_grad]
        return torch.autograd.grad(loss, trained)
