from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.nn import functional
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.ops import FrozenBatchNorm2d

from maskrcnn_trt.model.backbone import Backbone, build_resnet
from maskrcnn_trt.model.config.schema import BackboneConfig, ModelConfig
from maskrcnn_trt.model.roi_heads import RoiHeads

Name = Literal["resnet18", "resnet50", "resnet101"]
NORMS = {"frozen_bn": FrozenBatchNorm2d, "bn": nn.BatchNorm2d, "gn": nn.GroupNorm}


@pytest.mark.parametrize(
    ("name", "frozen_stages"),
    [("resnet18", 0), ("resnet50", 1), ("resnet50", 2), ("resnet50", 3), ("resnet101", 5)],
)
def test_parameters_and_frozen_stages_equal_torchvision(name: Name, frozen_stages: int) -> None:
    with torch.device("meta"):
        ours = Backbone(BackboneConfig(name=name, frozen_stages=frozen_stages))
        theirs = resnet_fpn_backbone(
            backbone_name=name,
            weights=None,
            norm_layer=FrozenBatchNorm2d,
            trainable_layers=5 - frozen_stages,
        )
    assert [(key, value.shape) for key, value in ours.state_dict().items()] == [
        (key, value.shape) for key, value in theirs.state_dict().items()
    ]
    assert [parameter.requires_grad for parameter in ours.parameters()] == [
        parameter.requires_grad for parameter in theirs.parameters()
    ]


@pytest.mark.parametrize(("norm", "fpn_norm"), [("frozen_bn", "none"), ("bn", "gn"), ("gn", "bn")])
def test_every_norm_builds_and_runs(norm: str, fpn_norm: str) -> None:
    norms: Any = {"norm": norm, "fpn_norm": fpn_norm, "norm_eps": 0.25}
    backbone = Backbone(BackboneConfig(name="resnet18", frozen_stages=0, fpn_channels=32, **norms))
    assert {m.eps for m in backbone.body.modules() if isinstance(m, NORMS[norm])} == {0.25}
    assert kinds_of_norms(backbone.body) == {norm}
    assert kinds_of_norms(backbone.fpn) == {fpn_norm} - {"none"}
    levels = backbone(torch.rand(2, 3, 64, 128))
    assert [tuple(level.shape) for level in levels] == [
        (2, 32, 64 // stride, 128 // stride) for stride in (4, 8, 16, 32, 64)
    ]
    sum(level.sum() for level in levels).backward()
    assert all(parameter.grad is not None for parameter in backbone.parameters())


def kinds_of_norms(module: nn.Module) -> set[str]:
    return {name for m in module.modules() for name, kind in NORMS.items() if isinstance(m, kind)}


@pytest.mark.parametrize(
    ("features", "channels", "norm"), [("c4", 1024, "gn"), ("c5", 2048, "frozen_bn")]
)
def test_backbone_without_pyramid_has_one_map_of_stride_16(
    features: str, channels: int, norm: str
) -> None:
    backbone = Backbone(BackboneConfig(features=features, norm=norm)).eval()
    with torch.inference_mode():
        (only,) = backbone(torch.rand(2, 3, 64, 128))
    assert only.shape == (2, channels, 4, 8)
    assert backbone.out_channels == channels
    assert ("layer4" in backbone.body) == (features == "c5")


def test_every_block_of_the_dilated_stage_has_dilation_two() -> None:
    torch.manual_seed(0)
    stage = build_resnet(BackboneConfig(features="c5")).eval().layer4
    features = torch.rand(1, 1024, 8, 8)
    with torch.inference_mode():
        expected = features
        for block in stage:
            hidden = block.bn1(functional.conv2d(expected, block.conv1.weight)).relu()
            hidden = functional.conv2d(hidden, block.conv2.weight, padding=2, dilation=2)
            hidden = block.bn3(functional.conv2d(block.bn2(hidden).relu(), block.conv3.weight))
            shortcut = expected if block.downsample is None else block.downsample(expected)
            expected = (hidden + shortcut).relu()
        torch.testing.assert_close(stage(features), expected)


def test_stride_in_1x1() -> None:
    """A 1x1 convolution with stride 2 equals one without stride on every second cell."""
    torch.manual_seed(0)
    block = build_resnet(BackboneConfig(stride_in_1x1=True)).eval().layer2[0]
    features = torch.rand(1, 256, 8, 8)
    with torch.inference_mode():
        sparse = features[..., ::2, ::2]
        hidden = block.bn1(functional.conv2d(sparse, block.conv1.weight)).relu()
        hidden = block.bn2(functional.conv2d(hidden, block.conv2.weight, padding=1)).relu()
        hidden = block.bn3(functional.conv2d(hidden, block.conv3.weight))
        shortcut = block.downsample[1](functional.conv2d(sparse, block.downsample[0].weight))
        torch.testing.assert_close(block(features), (hidden + shortcut).relu())


def test_statistics_of_frozen_stages_do_not_change() -> None:
    backbone = Backbone(BackboneConfig(name="resnet18", norm="bn", frozen_stages=2)).train()
    before = {name: value.clone() for name, value in backbone.named_buffers()}
    backbone(torch.rand(2, 3, 64, 64))
    changed = {n for n, value in backbone.named_buffers() if not torch.equal(value, before[n])}
    assert changed
    assert all(name.startswith(("body.layer2", "body.layer3", "body.layer4")) for name in changed)
    assert not any(name.startswith(("body.bn1", "body.layer1")) for name in changed)


def test_all_stages_can_be_frozen_later() -> None:
    backbone = Backbone(BackboneConfig(name="resnet18", norm="bn", frozen_stages=0)).train()
    backbone.freeze()
    assert not any(parameter.requires_grad for parameter in backbone.body.parameters())
    assert all(parameter.requires_grad for parameter in backbone.fpn.parameters())
    assert not any(module.training for module in backbone.body["layer4"].modules())


@pytest.mark.parametrize("stages", [0, 5])
def test_freezing_includes_the_stage_in_the_heads(stages: int) -> None:
    """With C4 features, res5 is a part of the heads."""
    backbone = {"name": "resnet10", "features": "c4", "norm": "bn", "frozen_stages": stages}
    heads = RoiHeads(ModelConfig.model_validate({"backbone": backbone}), 256).train()
    if not stages:
        assert all(module.training for module in heads.shared_head.modules())
        heads.freeze_shared_head()
    assert heads.box_predictor.training
    assert not any(module.training for module in heads.shared_head.modules())
    assert not any(parameter.requires_grad for parameter in heads.shared_head.parameters())


def test_training_pyramid_equals_the_interpolated_one() -> None:
    backbone = Backbone(
        BackboneConfig(name="resnet18", frozen_stages=0, fpn_channels=32, norm="gn")
    ).double()
    images, gradients = torch.rand(2, 3, 64, 96).double(), []
    for training in (True, False):
        backbone.fpn.train(training)
        maps = backbone(images)
        gradients.append(
            torch.autograd.grad(sum(m.square().sum() for m in maps), [*backbone.parameters()])
        )
    for own, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(own, expected)


def test_frozen_norm_keeps_the_dtype_of_autocast() -> None:
    config = BackboneConfig(name="resnet18", fpn_channels=32, norm="frozen_bn")
    with torch.autocast("cpu", torch.bfloat16):
        maps = Backbone(config).body(torch.rand(1, 3, 64, 64))
    assert {m.dtype for m in maps.values()} == {torch.bfloat16}
