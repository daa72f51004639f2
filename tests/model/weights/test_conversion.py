"""Conversion maps every tensor of a file bit for bit; none is lost or added."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_states import (
    State,
    caffe2,
    detectron2,
    maskrcnn_benchmark,
    random_state,
    torchvision_before_0_13,
)
from torchvision.models.detection import maskrcnn_resnet50_fpn_v2

from maskrcnn_trt.model.config.schema import ModelConfig
from maskrcnn_trt.model.weights.conversion import WeightsConversion, checkpoint_from_weights
from maskrcnn_trt.model.weights.files import WeightsError
from maskrcnn_trt.model.weights.recognition import read_weights

SMALL = {"fpn_channels": 32}
SMALL_HEADS = {"box_head_dim": 32, "mask_head_dim": 32}
LEGACY: dict[str, Any] = {
    "pixel_mean": (122.7717, 115.9465, 102.9801),
    "pixel_std": (1, 1, 1),
    "inclusive_boxes": True,
    "anchors": {"convention": "legacy"},
}
LEGACY_ROI = {"min_side": 0, "smooth_l1_beta": 1, "sampling_ratio": 2}
ONE_MAP_RPN = {"min_side": 0, "pre_nms_top_n_train": 12000, "pre_nms_top_n_test": 6000}


def config_of_detectron2(features: str, **backbone: Any) -> ModelConfig:
    """Return the configuration of detectron2's `Base-RCNN` files."""
    pyramid = {"post_nms_top_n_train": 1000} if features == "fpn" else ONE_MAP_RPN
    gn = backbone.get("norm") == "gn"
    roi = {"c4": {"box_pool": 14, "mask_head_dim": 32}}.get(features, SMALL_HEADS)
    convs = {"box_head_convs": 4, "head_norm": "gn"} if gn else {}
    return ModelConfig.model_validate(
        {
            "pixel_std": (1, 1, 1),
            "mask_paste": "detectron2",
            "anchors": {"convention": "detectron2"},
            "backbone": {"features": features, "stride_in_1x1": not gn, **backbone}
            | (SMALL if features == "fpn" else {}),
            "rpn": {"min_side": 0, "smooth_l1_beta": 0, **pyramid},
            "roi": {"aligned": True, "sampling_ratio": 0, "min_side": 0, "smooth_l1_beta": 0}
            | (roi | convs),
        }
    )


def legacy_config(features: str, **backbone: Any) -> ModelConfig:
    """Return the configuration of Detectron's and maskrcnn-benchmark's files."""
    gn = backbone.get("norm") == "gn"
    one_map = {"box_pool": 14, "mask_head_dim": 32, "sampling_ratio": 0}
    roi = SMALL_HEADS if features == "fpn" else one_map
    convs = {"box_head_convs": 4, "head_norm": "gn"} if gn else {}
    eps = {} if gn else {"norm_eps": 0}
    return ModelConfig.model_validate(
        LEGACY
        | {
            "backbone": {"features": features, "stride_in_1x1": not gn, **eps, **backbone}
            | (SMALL if features == "fpn" else {}),
            "rpn": {"min_side": 0} if features == "fpn" else ONE_MAP_RPN,
            "roi": LEGACY_ROI | roi | convs,
        }
    )


def saved(path: Path, content: object, protocol: int = 2) -> Path:
    """Write a pickle of arrays if the suffix is `.pkl`, else a torch file."""
    if path.suffix == ".pkl":
        path.write_bytes(pickle.dumps(content, protocol))
    else:
        torch.save(content, path)
    return path


def arrays(state: State) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in state.items()}


def check(path: Path, config: ModelConfig, state: State) -> WeightsConversion:
    """Convert a file, and compare with the expected configuration and tensors."""
    conversion = checkpoint_from_weights(read_weights(path))
    checkpoint = conversion.checkpoint
    assert checkpoint.model_config == config
    assert checkpoint.weights.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(checkpoint.weights[name], tensor), name
    assert conversion.num_loaded == len(state)
    assert checkpoint.preprocessing.pixel_mean == config.pixel_mean
    rules = {"torchvision": "torchvision", "detectron2": "detectron2"}
    assert checkpoint.preprocessing.resize == rules.get(conversion.origin, "pillow")
    return conversion


@pytest.mark.parametrize(
    "config",
    [
        config_of_detectron2("fpn"),
        config_of_detectron2("c4", name="resnet101"),
        config_of_detectron2("c5"),
        config_of_detectron2("fpn", norm="gn", fpn_norm="gn"),
    ],
    ids=["fpn", "r101-c4", "c5", "gn"],
)
def test_detectron2_inverts(config: ModelConfig, tmp_path: Path) -> None:
    state = random_state(config, background_rows=False)
    pyramid = config.backbone.features == "fpn"
    theirs = detectron2(state, pyramid=pyramid)
    anchors = {"proposal_generator.anchor_generator.cell_anchors.0": torch.ones(3, 4)}
    content = {"model": arrays(theirs | anchors), "__author__": "Detectron2 Model Zoo"}
    # Protocol 2, which older files have, takes seconds for the large ones.
    path = saved(tmp_path / "model.pkl", content, protocol=2 if pyramid else 4)
    conversion = check(path, config, state)
    assert conversion.ignored == tuple(anchors)
    names = [c.name for c in conversion.checkpoint.categories]
    assert (len(names), names[0], names[-1]) == (80, "person", "toothbrush")
    assert conversion.checkpoint.categories[-1].id == 90


def test_pixel_statistics_of_detectron2_trainer_files(tmp_path: Path) -> None:
    """A network with RGB input and unit deviation keeps its channels and strides in the 3x3."""
    config = config_of_detectron2("fpn", stride_in_1x1=False)
    config = config.model_copy(update={"pixel_std": (58.395, 57.12, 57.375)})
    state = random_state(config, background_rows=False)
    theirs = detectron2(state, pyramid=True)
    stem = "backbone.bottom_up.stem.conv1.weight"
    theirs[stem] = theirs[stem].flip(1)
    theirs["pixel_mean"] = torch.tensor(config.pixel_mean)[:, None, None]
    theirs["pixel_std"] = torch.tensor(config.pixel_std)[:, None, None]
    content = {"model": theirs, "iteration": 89999, "scheduler": {"last_epoch": 90000}}
    check(saved(tmp_path / "model_final.pth", content), config, state)


@pytest.mark.parametrize(
    "config",
    [
        legacy_config("fpn"),
        legacy_config("c4", name="resnet101"),
        legacy_config("fpn", norm="gn", fpn_norm="gn"),
    ],
    ids=["fpn", "r101-c4", "gn"],
)
def test_maskrcnn_benchmark_inverts(config: ModelConfig, tmp_path: Path) -> None:
    state = random_state(config)
    theirs = maskrcnn_benchmark(state)
    theirs["module.rpn.anchor_generator.cell_anchors.0"] = torch.ones(3, 4)
    content = {"model": theirs, "iteration": 16000, "optimizer": {"state": {}}}
    conversion = check(saved(tmp_path / "model.pth", content), config, state)
    assert conversion.ignored == ("rpn.anchor_generator.cell_anchors.0",)


@pytest.mark.parametrize(("features", "merged"), [("fpn", True), ("c4", False)])
def test_caffe2_inverts(features: str, merged: bool, tmp_path: Path) -> None:
    config = legacy_config(features, norm_eps=0 if merged else 1e-5)
    state = random_state(config)
    theirs = caffe2(state, merged=merged)
    if merged:
        for name, tensor in state.items():
            if "running" in name:
                tensor.fill_(name.endswith("running_var"))
    momentum = {"conv1_w_momentum": torch.ones(1)}
    content = {"blobs": arrays(theirs | momentum), "cfg": "MODEL: {}"}
    # As above, protocol 2 would take seconds for C4.
    path = saved(tmp_path / "model_final.pkl", content, protocol=2 if merged else 4)
    check(path, config, state)


@pytest.mark.parametrize("rename", [dict, torchvision_before_0_13])
def test_torchvision_inverts(rename: Callable[[State], State], tmp_path: Path) -> None:
    """Frozen batch norm and 91 outputs imply the published weights, with epsilon 0."""
    config = ModelConfig.model_validate(
        {"num_classes": 90, "backbone": {"norm_eps": 0, **SMALL}, "roi": SMALL_HEADS}
    )
    state = random_state(config)
    theirs = {f"module.{name}": tensor for name, tensor in rename(state).items()}
    path = saved(tmp_path / "model.pth", {"model": theirs, "epoch": 25})
    categories = check(path, config, state).checkpoint.categories
    assert [categories[i].name for i in (0, 11, 89)] == ["person", "N/A", "toothbrush"]
    assert [c.id for c in categories] == list(range(1, 91))


def test_torchvision_v2_inverts(tmp_path: Path) -> None:
    model = maskrcnn_resnet50_fpn_v2(weights=None, weights_backbone=None, num_classes=4)
    config = ModelConfig.model_validate(
        {
            "num_classes": 3,
            "backbone": {"norm": "bn", "fpn_norm": "bn"},
            "rpn": {"conv_depth": 2},
            "roi": {"box_head_convs": 4, "head_norm": "bn"},
        }
    )
    path = saved(tmp_path / "model.pth", model.state_dict())
    conversion = check(path, config, dict(model.state_dict()))
    names = [c.name for c in conversion.checkpoint.categories]
    assert names == ["class 1", "class 2", "class 3"]


@pytest.fixture(scope="module")
def own_state() -> State:
    config = config_of_detectron2("fpn").model_copy(update={"num_classes": 3})
    return detectron2(random_state(config), pyramid=True)


def converted(path: Path, *overrides: str, categories: Path | None = None) -> WeightsConversion:
    return checkpoint_from_weights(read_weights(path), overrides, categories)


def test_overrides_replace_assumed_settings(own_state: State, tmp_path: Path) -> None:
    path = saved(tmp_path / "model.pth", own_state)
    conversion = converted(path, "backbone.stride_in_1x1=false", "pixel_std=[58.4, 57.1, 57.4]")
    config = conversion.checkpoint.model_config
    assert not config.backbone.stride_in_1x1
    assert config.pixel_std == conversion.assumed["pixel_std"] == (58.4, 57.1, 57.4)
    for override, message in {
        "backbone.stride=1": r"backbone\.stride",
        "backbone": r"key\.path=value",
        "pixel_mean.red=1": "pixel_mean is a value",
        "preprocessing.resize=lanczos": "torchvision",
        "roi.box_head_dim=64": r"box_head\.fc6\.weight has shape \[32, .* needs \[64, ",
    }.items():
        with pytest.raises(WeightsError, match=message):
            converted(path, override)


def test_categories_come_from_the_data_set(own_state: State, tmp_path: Path) -> None:
    path = saved(tmp_path / "model.pth", own_state)
    classes = [{"id": i, "name": n} for i, n in ((8, "ring"), (3, "disc"), (7, "box"))]
    data = tmp_path / "coco.json"
    data.write_text(json.dumps({"categories": classes}))
    found = converted(path, categories=data).checkpoint.categories
    assert [(c.id, c.name) for c in found] == [(3, "disc"), (7, "box"), (8, "ring")]
    data.write_text(json.dumps({"categories": classes[:2]}))
    with pytest.raises(WeightsError, match=r"2 categories.* 3 classes"):
        converted(path, categories=data)
    data.write_text(json.dumps({"categories": [{**own, "id": 3} for own in classes]}))
    with pytest.raises(WeightsError, match="several categories with the id 3"):
        converted(path, categories=data)
    gaps = [{"id": i, "name": n} for i, n in ((1, "ring"), (3, "disc"))]
    data.write_text(json.dumps({"categories": gaps}))
    with pytest.raises(WeightsError, match=r"ids 1 to 3.*leave out --categories"):
        converted(path, categories=data)
    data.write_text("[]")
    with pytest.raises(WeightsError, match="no `categories`"):
        converted(path, categories=data)


def test_class_agnostic_boxes_and_masks_are_repeated(own_state: State, tmp_path: Path) -> None:
    shared = dict(own_state)
    for kind in ("weight", "bias"):
        for name, rows in (("box_predictor.bbox_pred", 4), ("mask_head.predictor", 1)):
            shared[f"roi_heads.{name}.{kind}"] = own_state[f"roi_heads.{name}.{kind}"][:rows]
    weights = converted(saved(tmp_path / "m.pth", shared)).checkpoint.weights
    boxes = weights["roi_heads.box_predictor.bbox_pred.weight"].view(4, 4, -1)
    masks = weights["roi_heads.mask_predictor.mask_fcn_logits.weight"]
    assert not boxes[0].any()
    assert not masks[0].any()
    for label in (1, 2, 3):
        assert torch.equal(boxes[label], shared["roi_heads.box_predictor.bbox_pred.weight"])
        assert torch.equal(masks[label], shared["roi_heads.mask_head.predictor.weight"][0])


def without(state: State, part: str) -> State:
    return {name: tensor for name, tensor in state.items() if part not in name}


UNSUPPORTED: dict[str, tuple[Callable[[State], State], str]] = {
    "a missing layer": (lambda s: without(s, "mask_fcn2."), "mask_head"),
    "no masks": (lambda s: without(s, "mask_head."), "mask head"),
    "deformable": (
        lambda s: s | {"backbone.bottom_up.res4.0.conv2_offset.weight": torch.ones(1)},
        r"detectron2 tensors .*conv2_offset\.weight",
    ),
    "a cascade": (
        lambda s: {n.replace("box_head.", "box_head.0."): t for n, t in s.items()},
        r"roi_heads\.box_head\.0\.fc1",
    ),
    "another depth": (lambda s: without(s, "res4.5."), "5 blocks"),
    "a backbone": (
        lambda s: {n: t for n, t in s.items() if "bottom_up" in n},
        "maskrcnn train CONFIG weights=FILE",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_models_are_rejected(kind: str, own_state: State, tmp_path: Path) -> None:
    change, message = UNSUPPORTED[kind]
    path = saved(tmp_path / "model.pth", change(own_state))
    with pytest.raises(WeightsError, match=message) as caught:
        converted(path)
    assert "\n" not in str(caught.value)
