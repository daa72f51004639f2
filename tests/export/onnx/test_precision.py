from pathlib import Path
from typing import Literal

import onnx
import pytest
import torch
from onnx import TensorProto
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from maskrcnn_trt.export.onnx.precision import (
    fold_batch_norms,
    replace_transposed_convolution,
)
from maskrcnn_trt.export.verify import verify_bundle
from maskrcnn_trt.model.backbone import Backbone
from maskrcnn_trt.model.bundle.manifest import read_manifest
from maskrcnn_trt.model.checkpoint import load_checkpoint
from maskrcnn_trt.model.config.schema import BackboneConfig

Norm = Literal["frozen_bn", "bn", "gn"]


def backbone_with_statistics(norm: Norm) -> nn.Module:
    """Backbone whose norms have random statistics, so that they are not the identity."""
    torch.manual_seed(0)
    config = BackboneConfig(name="resnet18", norm=norm, frozen_stages=0, fpn_channels=32)
    backbone = Backbone(config).eval()
    for module in backbone.modules():
        if isinstance(module, nn.BatchNorm2d | FrozenBatchNorm2d):
            for name in ("weight", "bias", "running_mean", "running_var"):
                getattr(module, name).data.uniform_(0.5, 1.5)
    return backbone


@torch.no_grad()
def test_replaced_transposed_convolution_keeps_the_features(tiny_checkpoint: Path) -> None:
    model = load_checkpoint(tiny_checkpoint).build_model()
    transposed = model.roi_heads.mask_predictor.conv5_mask
    features = torch.randn(3, transposed.in_channels, 5, 7)
    expected = transposed(features)
    replace_transposed_convolution(model)
    found = model.roi_heads.mask_predictor.conv5_mask(features)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("norm", "is_left"), [("frozen_bn", False), ("bn", False), ("gn", True)])
@torch.no_grad()
def test_folding_keeps_the_features(norm: Norm, is_left: bool) -> None:
    """Only batch norms are removed."""
    backbone, images = backbone_with_statistics(norm), torch.randn(2, 3, 64, 64)
    expected, before = backbone(images), number_of_norms(backbone)
    fold_batch_norms(backbone)
    assert number_of_norms(backbone) == (before if is_left else 0)
    for features, wanted in zip(backbone(images), expected, strict=True):
        scale = wanted.abs().max()
        torch.testing.assert_close(features / scale, wanted / scale, atol=1e-4, rtol=0)


def number_of_norms(module: nn.Module) -> int:
    kinds = (nn.BatchNorm2d, FrozenBatchNorm2d, nn.GroupNorm)
    return sum(isinstance(part, kinds) for part in module.modules())


def test_half_precision_weights_are_stored_as_fp16(half_bundle: Path) -> None:
    (artifact,) = read_manifest(half_bundle).artifacts
    graph = onnx.load(half_bundle / artifact.path).graph
    sizes = {TensorProto.FLOAT: 0, TensorProto.FLOAT16: 0}
    for tensor in graph.initializer:
        if tensor.data_type in sizes:
            sizes[tensor.data_type] += torch.Size(tensor.dims).numel()
    # A ResNet-10 has 4.9 million weights. Anchors and a few constants stay in fp32.
    assert sizes[TensorProto.FLOAT16] > 4.9e6
    assert sizes[TensorProto.FLOAT] < 1e5


def test_half_precision_is_within_tolerance(half_bundle: Path, tiny_checkpoint: Path) -> None:
    (comparison,) = verify_bundle(
        half_bundle, read_manifest(half_bundle), load_checkpoint(tiny_checkpoint), []
    )
    assert comparison.detections > 0
    assert comparison.passed
    # Without any difference, the model did not run in half precision.
    assert comparison.scores > 0
