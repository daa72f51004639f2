"""Every kind of body as a program of torch."""

import pytest
import torch
from bodies import HEIGHT, WIDTH, pictures, random_model, small_config

from maskrcnn_trt.export.fused_modules import rearrange_for_gpu
from maskrcnn_trt.export.precision import fold_batch_norms
from maskrcnn_trt.export.torch_program import program_from_model
from maskrcnn_trt.model.spec import ShapeBucket


@pytest.mark.parametrize(
    ("features", "norm", "changes"),
    [
        ("fpn", "frozen_bn", {}),
        ("fpn", "gn", {"roi": {"head_norm": "gn", "box_head_convs": 2}, "rpn": {"conv_depth": 2}}),
        ("c4", "frozen_bn", {}),
        ("c5", "bn", {}),
    ],
)
def test_programs_compute_what_their_models_compute(
    features: str, norm: str, changes: dict[str, dict[str, object]]
) -> None:
    model = random_model(small_config("resnet50", features, norm, **changes)).eval()
    images, image_sizes = pictures()
    with torch.inference_mode():
        expected = model.detect(images, image_sizes)
    assert expected.num_detections.min() > 0
    fold_batch_norms(model)
    rearrange_for_gpu(model)
    program = program_from_model(model, ShapeBucket(HEIGHT, WIDTH), torch.uint8)
    with torch.inference_mode():
        actual = program.module()(images, image_sizes)
    torch.testing.assert_close(tuple(actual), tuple(expected), rtol=1e-3, atol=2e-3)
