"""Settings of `config.yaml` beside weights of detectron2, and warnings without it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from foreign_states import State, detectron2, random_state

from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.model.config.schema import ModelConfig
from maskrcnn_trt.model.weights.detectron2_config import read_config
from maskrcnn_trt.model.weights.files import WeightsError
from maskrcnn_trt.model.weights.references import convert_reference

# As detectron2's trainer writes it, without the keys that do not affect detections.
CONFIG: dict[str, Any] = {
    "INPUT": {"FORMAT": "RGB", "MIN_SIZE_TEST": 640, "MAX_SIZE_TEST": 1000},
    "MODEL": {
        "META_ARCHITECTURE": "GeneralizedRCNN",
        "MASK_ON": True,
        "PIXEL_MEAN": [10.0, 120.0, 90.0],
        "PIXEL_STD": [50.0, 51.0, 52.0],
        "BACKBONE": {"NAME": "build_resnet_fpn_backbone", "FREEZE_AT": 3},
        "RESNETS": {"STRIDE_IN_1X1": True, "NORM": "FrozenBN"},
        "ANCHOR_GENERATOR": {
            "NAME": "DefaultAnchorGenerator",
            "OFFSET": 0.0,
            "SIZES": [[16], [32], [64], [128], [256]],
            "ASPECT_RATIOS": [[0.25, 1.0, 4.0]],
        },
        "RPN": {
            "NMS_THRESH": 0.6,
            "PRE_NMS_TOPK_TEST": 500,
            "POST_NMS_TOPK_TEST": 300,
            "IOU_THRESHOLDS": [0.25, 0.75],
            "BBOX_REG_WEIGHTS": [1.0, 1.0, 1.0, 1.0],
        },
        "ROI_HEADS": {
            "NAME": "StandardROIHeads",
            "NUM_CLASSES": 3,
            "SCORE_THRESH_TEST": 0.3,
            "NMS_THRESH_TEST": 0.4,
            "IOU_THRESHOLDS": [0.5],
        },
        "ROI_BOX_HEAD": {
            "POOLER_TYPE": "ROIAlign",
            "POOLER_SAMPLING_RATIO": 2,
            "BBOX_REG_WEIGHTS": [10.0, 10.0, 5.0, 5.0],
        },
        "ROI_MASK_HEAD": {"POOLER_TYPE": "ROIAlign", "POOLER_SAMPLING_RATIO": 2},
    },
    "TEST": {"DETECTIONS_PER_IMAGE": 7},
    "VERSION": 2,
}
STEM = "backbone.body.conv1.weight"


@pytest.fixture(scope="module")
def state() -> State:
    values = {
        "num_classes": 3,
        "backbone": {"name": "resnet18", "fpn_channels": 32},
        "roi": {"box_head_dim": 16, "mask_head_dim": 16},
    }
    return random_state(ModelConfig.model_validate(values), background_rows=False)


@pytest.fixture
def weights(state: State, tmp_path: Path) -> Path:
    path = tmp_path / "model_final.pth"
    torch.save({"model": detectron2(state, pyramid=True)}, path)
    return path


def test_the_configuration_beside_weights_is_used(
    weights: Path, state: State, caplog: pytest.LogCaptureFixture
) -> None:
    weights.with_name("config.yaml").write_text(yaml.safe_dump(CONFIG))
    conversion = convert_reference(weights, ["roi.nms_iou=0.45"])
    checkpoint = conversion.checkpoint
    sizes = checkpoint.preprocessing
    assert (sizes.min_size, sizes.max_size, sizes.resize) == (640, 1000, "detectron2")
    assert checkpoint.buckets == (ShapeBucket(640, 1024), ShapeBucket(1024, 640))
    config = checkpoint.model_config
    assert config.pixel_mean == sizes.pixel_mean == (10, 120, 90)
    assert config.pixel_std == (50, 51, 52)
    assert (config.backbone.stride_in_1x1, config.backbone.frozen_stages) == (True, 3)
    assert config.anchors.sizes == (16, 32, 64, 128, 256)
    assert config.anchors.aspect_ratios == (0.25, 1, 4)
    rpn, roi = config.rpn, config.roi
    assert (rpn.nms_iou, rpn.pre_nms_top_n_test, rpn.post_nms_top_n_test) == (0.6, 500, 300)
    assert (rpn.sampling.background_iou, rpn.sampling.foreground_iou) == (0.25, 0.75)
    assert (roi.score_threshold, roi.nms_iou, roi.max_detections) == (0.3, 0.45, 7)
    assert (roi.aligned, roi.sampling_ratio) == (False, 2)
    # `detectron2` wrote the channels of a network that takes BGR; this one takes RGB.
    assert torch.equal(checkpoint.weights[STEM], state[STEM].flip(1))
    assert not conversion.assumed.keys() & {"pixel_mean", "roi.aligned", "preprocessing.min_size"}
    assert not caplog.records


def test_assumptions_without_a_configuration_are_named(
    weights: Path, state: State, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = convert_reference(weights, ["preprocessing.max_size=1200"]).checkpoint
    assert checkpoint.buckets == (ShapeBucket(800, 1216), ShapeBucket(1216, 800))
    assert torch.equal(checkpoint.weights[STEM], state[STEM])
    (warning,) = caplog.messages
    assert "config.yaml" in warning
    for fact in (
        "preprocessing.min_size=800",
        "preprocessing.resize=detectron2",
        "pixel_mean=[123.675, 116.28, 103.53]",
        "anchors.sizes=[32",
        "roi.score_threshold=0.05",
    ):
        assert fact in warning
    assert "preprocessing.max_size" not in warning


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("MODEL.ANCHOR_GENERATOR", "OFFSET", 0.5, "OFFSET to 0.5"),
        ("MODEL.ANCHOR_GENERATOR", "SIZES", [[32, 64]], "SIZES"),
        ("MODEL.ROI_MASK_HEAD", "POOLER_TYPE", "ROIAlignV2", "ROI_MASK_HEAD.POOLER_TYPE"),
        ("MODEL.ROI_HEADS", "IN_FEATURES", ["p3", "p4", "p5"], "ROI_HEADS.IN_FEATURES"),
        ("MODEL.RPN", "IN_FEATURES", ["p2", "p3"], "RPN.IN_FEATURES"),
        ("MODEL.ROI_HEADS", "NUM_CLASSES", 80, "3 classes.* 80"),
        ("INPUT", "FORMAT", "YUV-BT.601", "FORMAT"),
        ("INPUT", "MIN_SIZE_TEST", 0, "preprocessing.min_size is 0"),
        ("MODEL", "PIXEL_MEAN", [1, 2], r"other\.yaml has an invalid value"),
        ("MODEL.ANCHOR_GENERATOR", "SIZES", 32, r"other\.yaml has an invalid value"),
        ("MODEL.RPN", "IOU_THRESHOLDS", 0.5, r"other\.yaml has an invalid value"),
    ],
)
def test_settings_that_cannot_be_represented_are_named(
    weights: Path, section: str, key: str, value: object, message: str
) -> None:
    config: dict[str, Any] = yaml.safe_load(yaml.safe_dump(CONFIG))
    part = config
    for name in section.split("."):
        part = part[name]
    part[key] = value
    path = weights.with_name("other.yaml")
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(WeightsError, match=message):
        convert_reference(weights, config=path)


def test_single_maps_of_stride_32_are_rejected(weights: Path) -> None:
    config: dict[str, Any] = yaml.safe_load(yaml.safe_dump(CONFIG))
    config["MODEL"]["BACKBONE"]["NAME"] = "build_resnet_backbone"
    config["MODEL"]["RESNETS"]["RES5_DILATION"] = 1
    path = weights.with_name("other.yaml")
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(WeightsError, match=r"RESNETS\.RES5_DILATION to 1"):
        convert_reference(weights, config=path)


@pytest.mark.parametrize(
    ("backbone", "head", "levels"),
    [
        ("build_resnet_backbone", "Res5ROIHeads", ["res5"]),
        ("build_resnet_backbone", "StandardROIHeads", ["res4"]),
        ("build_resnet_fpn_backbone", "StandardROIHeads", ["res5"]),
    ],
)
def test_heads_that_read_other_maps_are_rejected(
    weights: Path, backbone: str, head: str, levels: list[str]
) -> None:
    config: dict[str, Any] = yaml.safe_load(yaml.safe_dump(CONFIG))
    config["MODEL"]["BACKBONE"]["NAME"] = backbone
    config["MODEL"]["ROI_HEADS"] |= {"NAME": head, "IN_FEATURES": levels}
    path = weights.with_name("other.yaml")
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(WeightsError, match=r"ROI_HEADS\.IN_FEATURES"):
        convert_reference(weights, config=path)


@pytest.mark.parametrize("name", ["res4", "res5"])
def test_single_maps_are_read_without_the_name_of_the_backbone(name: str, tmp_path: Path) -> None:
    path, maps = tmp_path / "single.yaml", {"IN_FEATURES": [name]}
    path.write_text(yaml.safe_dump({"MODEL": {"RPN": maps, "ROI_HEADS": maps}}))
    assert read_config(path) is not None


def test_tuples_are_read(weights: Path) -> None:
    config: dict[str, Any] = yaml.safe_load(yaml.safe_dump(CONFIG))
    config["MODEL"]["PIXEL_MEAN"] = "(11.0, 120.0, 90.0)"
    config["MODEL"]["ANCHOR_GENERATOR"]["SIZES"] = "((8,), (16,), (32,), (64,), (128,))"
    config["MODEL"]["RPN"] |= {"IOU_THRESHOLDS": "(0.2, 0.8)", "BBOX_REG_WEIGHTS": "(1, 1, 1, 1)"}
    path = weights.with_name("other.yaml")
    path.write_text(yaml.safe_dump(config))
    read = convert_reference(weights, config=path).checkpoint.model_config
    assert read.pixel_mean == (11, 120, 90)
    assert read.anchors.sizes == (8, 16, 32, 64, 128)
    assert (read.rpn.sampling.background_iou, read.rpn.sampling.foreground_iou) == (0.2, 0.8)


def test_bases_are_read_and_other_files_are_not(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(CONFIG))
    path = tmp_path / "derived.yaml"
    path.write_text("_BASE_: base.yaml\nINPUT: {MIN_SIZE_TEST: 320}\n")
    sizes = convert_reference(weights, config=path).checkpoint.preprocessing
    assert (sizes.min_size, sizes.max_size) == (320, 1000)
    for content, message in {
        "- a list": "no section MODEL",
        "{": "not YAML",
        "_BASE_: none.yaml": "none.yaml: No such file",
        "_BASE_: derived.yaml": "derived.yaml inherits from itself",
    }.items():
        path.write_text(content)
        with pytest.raises(WeightsError, match=message):
            convert_reference(weights, config=path)
    path.write_text("solver: {}")  # of another program, beside the weights
    path.rename(tmp_path / "config.yaml")
    assert convert_reference(weights).checkpoint.preprocessing.min_size == 800
