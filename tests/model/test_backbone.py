from typing import Literal

import pytest
import torch
from torch import nn
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.ops import FrozenBatchNorm2d

from maskrcnn_trt.model.backbone import build_backbone
from maskrcnn_trt.model.config import BackboneConfig

Name = Literal["resnet18", "resnet50", "resnet101"]


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "resnet101"])
@pytest.mark.parametrize("frozen_stages", [0, 1, 2, 3, 5])
def test_parameters_and_what_is_frozen_are_torchvisions(name: Name, frozen_stages: int) -> None:
    with torch.device("meta"):
        ours = build_backbone(BackboneConfig(name=name, frozen_stages=frozen_stages))
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


@pytest.mark.parametrize(
    ("norm", "kind", "in_pyramid"),
    [
        ("frozen_bn", FrozenBatchNorm2d, False),
        ("bn", nn.BatchNorm2d, True),
        ("gn", nn.GroupNorm, True),
    ],
)
def test_every_norm_builds_and_runs(
    norm: Literal["frozen_bn", "bn", "gn"], kind: type[nn.Module], in_pyramid: bool
) -> None:
    backbone = build_backbone(
        BackboneConfig(name="resnet18", norm=norm, frozen_stages=0, fpn_channels=32)
    )
    kinds = (FrozenBatchNorm2d, nn.BatchNorm2d, nn.GroupNorm)
    norms = [(name, m) for name, m in backbone.named_modules() if isinstance(m, kinds)]
    assert all(isinstance(module, kind) for _, module in norms)
    assert any(name.startswith("fpn") for name, _ in norms) == in_pyramid
    levels = list(backbone(torch.rand(2, 3, 64, 128)).values())
    assert [tuple(level.shape) for level in levels] == [
        (2, 32, 64 // stride, 128 // stride) for stride in (4, 8, 16, 32, 64)
    ]
    sum(level.sum() for level in levels).backward()
    assert all(parameter.grad is not None for parameter in backbone.parameters())
