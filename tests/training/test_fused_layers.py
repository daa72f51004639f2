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
    """Errors of the layers' gradients: small in fp32, in bf16 as small as without fusion."""
    torch.manual_seed(0)
    backbone = BackboneConfig(features=features, frozen_stages=1)
    model = MaskRCNN(ModelConfig(num_classes=3, backbone=backbone)).to(device).train()
    for name, buffer in model.named_buffers():
        if "running_var" in name:
            buffer.add_(torch.rand_like(buffer) / 4)
    fused = deepcopy(model)
    fuse_layers(fused)
    exact = gradients(deepcopy(model).double(), autocast=False)
    fp32, bf16, separate_bf16 = (
        torch.stack([(a - b).norm() / b.norm() for a, b in zip(rounded, exact, strict=True)])
        for rounded in (gradients(fused, False), gradients(fused, True), gradients(model, True))
    )
    # If a rounding error changes the sign of a ReLU's input, the errors of all layers before it are
    # about 1e-3. So check the smallest quarter of the errors.
    assert 0 < fp32.quantile(0.25) < 1e-5
    assert 0 < bf16.mean() < 1.2 * separate_bf16.mean() < 0.3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fused_mask_predictor_is_as_accurate_as_separate_layers(device: str) -> None:
    """Masks and gradients in bf16 differ from those in fp32 as much as without fusion."""
    torch.manual_seed(0)
    model = MaskRCNN(ModelConfig(num_classes=3)).to(device).train()
    fused = deepcopy(model)
    fuse_layers(fused)
    features = torch.randn(6, 256, 14, 14).to(device, memory_format=torch.channels_last)
    labels = torch.tensor([1, 3, 0, 2, 2, 1], device=device)

    def masks_and_gradients(model: MaskRCNN, autocast: bool) -> list[Tensor]:
        predictor, inputs = model.roi_heads.mask_predictor, features.clone().requires_grad_()
        for layer in (predictor.conv5_mask, predictor.mask_fcn_logits):
            torch.nn.init.constant_(layer.bias, 0.1)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                masks = predictor(inputs.bfloat16() if autocast else inputs, labels)
            # Its gradients have one sign, so that their sums do not cancel out.
            masks.float().sigmoid().sum().backward()
        return [masks.float(), inputs.grad, *(x.grad for x in predictor.parameters())]

    exact = masks_and_gradients(deepcopy(model), autocast=False)
    for own, wanted in zip(masks_and_gradients(deepcopy(fused), False), exact, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-3, atol=1e-3)
    errors = [
        torch.stack([(a - b).norm() / b.norm() for a, b in zip(rounded, exact, strict=True)])
        for rounded in (masks_and_gradients(x, autocast=True) for x in (fused, model))
    ]
    assert (errors[0] < 1.2 * errors[1] + 1e-3).all()
    assert (errors[1] < 0.05).all()


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
