"""Equality of torch programs and their models for every kind of backbone."""

import pytest
import torch
from small_models import (
    HEIGHT,
    SHORT_RESNET50,
    WIDTH,
    noise_images,
    random_model,
    small_config,
)
from torchvision.models import resnet

from maskrcnn_trt.export.onnx.precision import fold_batch_norms, halve
from maskrcnn_trt.export.torch_program.fused_modules import optimize_for_gpu
from maskrcnn_trt.export.torch_program.program import program_from_model
from maskrcnn_trt.model.bundle.spec import ShapeBucket


@pytest.mark.parametrize("norm", ["gn", "bn", "frozen_bn"])
@torch.no_grad()
def test_stem_in_16_bits_keeps_its_norm(norm: str) -> None:
    """A group norm cannot be folded into the convolution before it."""
    model = random_model(small_config("resnet18", "fpn", norm)).eval()
    for parameter in model.backbone.body.bn1.parameters():
        parameter.uniform_(0.5, 1.5)
    images, image_sizes = noise_images()
    expected = model.stem(images, image_sizes)
    fold_batch_norms(model)
    halve(model, torch.bfloat16)
    optimize_for_gpu(model)
    actual = model.stem(images, image_sizes).float()
    torch.testing.assert_close(actual, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("features", "norm", "changes"),
    [("fpn", "gn", {"roi": {"head_norm": "gn", "box_head_convs": 2}, "rpn": {"conv_depth": 2}}),
     ("c4", "frozen_bn", {}), ("c5", "bn", {})],
)  # fmt: skip
def test_program_reproduces_the_model_for_every_body(
    features: str,
    norm: str,
    changes: dict[str, dict[str, object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resnet, "resnet50", SHORT_RESNET50)
    name = "resnet50" if features == "c5" else "resnet10"
    model = random_model(small_config(name, features, norm, **changes)).eval()
    images, image_sizes = noise_images()
    with torch.inference_mode():
        expected = model.detect(images, image_sizes)
    assert expected.num_detections.min() > 0
    fold_batch_norms(model)
    optimize_for_gpu(model)
    program = program_from_model(model, ShapeBucket(HEIGHT, WIDTH), torch.uint8)
    with torch.inference_mode():
        actual = program.module()(images, image_sizes)
    torch.testing.assert_close(tuple(actual), tuple(expected), rtol=1e-3, atol=2e-3)
