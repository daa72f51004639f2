"""Checkpoints of published models: settings, classes and sizes that their files do not hold."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_states import detectron2, random_state
from zoo_mirror import zoo_mirror

from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.model.checkpoint import (
    Checkpoint,
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
)
from maskrcnn_trt.model.config.schema import ModelConfig
from maskrcnn_trt.model.weights.files import WeightsError
from maskrcnn_trt.model.weights.references import checkpoint_from_reference, convert_reference

# Narrow, so that the files are small. detectron2's own widths do not change names and layouts.
BACKBONE = {"name": "resnet18", "fpn_channels": 32}
HEADS = {"box_head_dim": 16, "mask_head_dim": 16}


def checkpoint_of(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> Checkpoint:
    """Serve random weights under a model's name, and return its checkpoint."""
    values: dict[str, Any] = {"backbone": BACKBONE, "rpn": {}, "roi": HEADS}
    for section, change in changes.items():
        values[section] = values[section] | change if isinstance(change, dict) else change
    state = random_state(ModelConfig.model_validate(values), background_rows=False)
    theirs = detectron2(state, pyramid=True)
    # Without `pixel_mean` and `pixel_std`, as in files that detectron2 has written since 2020.
    content = {"model": {n: t.numpy() for n, t in theirs.items()}, "__author__": "Detectron2"}
    with zoo_mirror(tmp_path, monkeypatch, {name: pickle.dumps(content, protocol=2)}):
        checkpoint = checkpoint_from_reference(name)
    for key, tensor in state.items():
        assert torch.equal(checkpoint.weights[key], tensor), key
    return checkpoint


def test_a_model_of_coco(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = checkpoint_of("detectron2:mask_rcnn_R_50_FPN_3x", tmp_path, monkeypatch)
    assert [c.name for c in checkpoint.categories][::79] == ["person", "toothbrush"]
    assert (checkpoint.preprocessing.min_size, checkpoint.preprocessing.max_size) == (800, 1333)
    assert checkpoint.buckets == (ShapeBucket(800, 1344), ShapeBucket(1344, 800))
    config = checkpoint.model_config
    assert config.pixel_std == checkpoint.preprocessing.pixel_std == (1, 1, 1)
    assert config.backbone.stride_in_1x1
    assert (config.roi.aligned, config.roi.sampling_ratio) == (True, 0)


def test_a_model_of_cityscapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "detectron2:Cityscapes/mask_rcnn_R_50_FPN"
    checkpoint = checkpoint_of(name, tmp_path, monkeypatch, num_classes=8)
    names = ["person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle"]
    assert [c.name for c in checkpoint.categories] == names
    assert [c.id for c in checkpoint.categories] == [24, 25, 26, 27, 28, 31, 32, 33]
    assert (checkpoint.preprocessing.min_size, checkpoint.preprocessing.max_size) == (1024, 2048)
    assert checkpoint.buckets == (ShapeBucket(1024, 2048), ShapeBucket(2048, 1024))


def test_a_model_from_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Synchronised batch norm everywhere, and pixels divided by their deviation."""
    checkpoint = checkpoint_of(
        "detectron2:scratch_mask_rcnn_R_50_FPN_9x_syncbn",
        tmp_path,
        monkeypatch,
        backbone={"norm": "bn", "fpn_norm": "bn"},
        roi={"box_head_convs": 4, "head_norm": "bn"},
    )
    config = checkpoint.model_config
    assert config.pixel_std == checkpoint.preprocessing.pixel_std == (58.395, 57.12, 57.375)
    assert not config.backbone.stride_in_1x1
    assert (config.backbone.norm, config.roi.head_norm) == ("bn", "bn")


def test_a_model_with_large_scale_jitter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norm, two convolutions in the RPN, and MSRA's pixels despite training from scratch."""
    checkpoint = checkpoint_of(
        "detectron2:new_baselines/mask_rcnn_R_50_FPN_400ep_LSJ",
        tmp_path,
        monkeypatch,
        backbone={"norm": "bn", "fpn_norm": "bn"},
        rpn={"conv_depth": 2},
        roi={"box_head_convs": 4, "head_norm": "bn"},
    )
    config = checkpoint.model_config
    assert (config.pixel_std, config.backbone.stride_in_1x1) == ((1, 1, 1), True)
    assert config.rpn.conv_depth == 2


def test_the_settings_of_detectron_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "detectron2:mask_rcnn_R_50_FPN_noaug_1x"
    roi = checkpoint_of(name, tmp_path, monkeypatch).model_config.roi
    assert (roi.aligned, roi.sampling_ratio) == (False, 2)


def test_a_model_of_lvis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "detectron2:LVISv0.5-InstanceSegmentation/mask_rcnn_R_50_FPN_1x"
    checkpoint = checkpoint_of(name, tmp_path, monkeypatch, num_classes=1230)
    roi = checkpoint.model_config.roi
    assert (roi.max_detections, roi.score_threshold) == (300, 0.0001)
    assert [c.id for c in checkpoint.categories][::1229] == [1, 1230]


def test_the_assumed_epsilon_of_finetuned_torchvision_files_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = {"num_classes": 3, "backbone": BACKBONE, "roi": HEADS}
    path = tmp_path / "pets.pth"
    torch.save(random_state(ModelConfig.model_validate(values)), path)
    checkpoint = convert_reference(path).checkpoint
    assert checkpoint.preprocessing.resize == "torchvision"
    (warning,) = caplog.messages
    for fact in ("backbone.norm_eps=1e-05", "COCO_V1", "backbone.norm_eps=0"):
        assert fact in warning
    caplog.clear()
    config = convert_reference(path, ["backbone.norm_eps=0"]).checkpoint.model_config
    assert config.backbone.norm_eps == 0
    assert not caplog.messages


def test_own_checkpoints_are_not_converted(tiny_checkpoint: Path) -> None:
    assert checkpoint_from_reference(tiny_checkpoint).iteration == 0
    expected = load_checkpoint(tiny_checkpoint)
    assert checkpoint_from_reference(str(tiny_checkpoint)).categories == expected.categories
    with pytest.raises(WeightsError, match="already a checkpoint"):
        convert_reference(tiny_checkpoint)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(
    tiny_checkpoint: Path, tmp_path: Path, value: float
) -> None:
    """A run can still be resumed from them."""
    tiny, path = load_checkpoint(tiny_checkpoint), tmp_path / "weights.pth"
    weights = {name: tensor.clone() for name, tensor in tiny.weights.items()}
    weights["rpn.head.cls_logits.bias"][1] = value
    save_checkpoint(path, replace(tiny, weights=weights))
    with pytest.raises(WeightsError, match=r"weights\.pth: tensor rpn\.head\.cls_logits\.bias has"):
        checkpoint_from_reference(path)
    assert load_checkpoint(path).iteration == 0
    state = random_state(ModelConfig.model_validate({"backbone": BACKBONE, "roi": HEADS}))
    state["backbone.body.conv1.weight"][0] = value
    torch.save(detectron2(state, pyramid=True), path)
    with pytest.raises(
        WeightsError, match=r"weights\.pth: tensor backbone\.body\.conv1\.weight has"
    ):
        convert_reference(path)


def test_incomplete_checkpoints_name_the_missing_part(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    content, path = torch.load(tiny_checkpoint, weights_only=True), tmp_path / "part.pth"
    for key in content:
        torch.save({k: v for k, v in content.items() if k != key}, path)
        with pytest.raises(CheckpointError, match=rf"part\.pth .* lacks '{key}'"):
            checkpoint_from_reference(path)
    name = "rpn.head.conv.0.0.bias"
    weights = {k: v for k, v in content["model"].items() if k != name}
    zeros = torch.zeros(3)
    for changed in (weights, weights | {name: zeros}, {**content["model"], "more": zeros}):
        torch.save(content | {"model": changed}, path)
        with pytest.raises(WeightsError, match=rf"part\.pth.*({name}|more)"):
            checkpoint_from_reference(path)


def test_a_bundle_holds_no_weights(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"is a bundle.*give the checkpoint"):
        checkpoint_from_reference(tmp_path)
