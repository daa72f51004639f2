"""Reading of a model's settings from detectron2's configuration file (`config.yaml`)."""

import ast
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from ..config.overrides import values_by_key
from ..config.strict_yaml import value_from_yaml
from .detectron2 import IS_BGR
from .downloads import base_config
from .files import WeightsError
from .origins import Settings

# Settings of this program by detectron2's keys. Values have the same meaning in both programs.
_KEYS = {
    "INPUT.MIN_SIZE_TEST": "preprocessing.min_size",
    "INPUT.MAX_SIZE_TEST": "preprocessing.max_size",
    "MODEL.BACKBONE.FREEZE_AT": "backbone.frozen_stages",
    "MODEL.RESNETS.STRIDE_IN_1X1": "backbone.stride_in_1x1",
    "MODEL.PROPOSAL_GENERATOR.MIN_SIZE": "rpn.min_side",
    "MODEL.RPN.PRE_NMS_TOPK_TRAIN": "rpn.pre_nms_top_n_train",
    "MODEL.RPN.PRE_NMS_TOPK_TEST": "rpn.pre_nms_top_n_test",
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": "rpn.post_nms_top_n_train",
    "MODEL.RPN.POST_NMS_TOPK_TEST": "rpn.post_nms_top_n_test",
    "MODEL.RPN.NMS_THRESH": "rpn.nms_iou",
    "MODEL.RPN.SMOOTH_L1_BETA": "rpn.smooth_l1_beta",
    "MODEL.RPN.BATCH_SIZE_PER_IMAGE": "rpn.sampling.batch_size_per_image",
    "MODEL.RPN.POSITIVE_FRACTION": "rpn.sampling.positive_fraction",
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": "roi.sampling.batch_size_per_image",
    "MODEL.ROI_HEADS.POSITIVE_FRACTION": "roi.sampling.positive_fraction",
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": "roi.score_threshold",
    "MODEL.ROI_HEADS.NMS_THRESH_TEST": "roi.nms_iou",
    "MODEL.ROI_BOX_HEAD.SMOOTH_L1_BETA": "roi.smooth_l1_beta",
    "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": "roi.box_pool",
    "MODEL.ROI_BOX_HEAD.POOLER_SAMPLING_RATIO": "roi.sampling_ratio",
    "MODEL.ROI_MASK_HEAD.POOLER_RESOLUTION": "roi.mask_pool",
    "TEST.DETECTIONS_PER_IMAGE": "roi.max_detections",
}
# Settings of which this model supports only the listed values.
_FIXED: Mapping[str, Sequence[object]] = {
    "MODEL.META_ARCHITECTURE": ("GeneralizedRCNN", "PanopticFPN"),
    "MODEL.MASK_ON": (True,),
    "MODEL.ANCHOR_GENERATOR.NAME": ("DefaultAnchorGenerator",),
    "MODEL.ANCHOR_GENERATOR.OFFSET": (0,),
    "MODEL.FPN.FUSE_TYPE": ("sum",),
    "MODEL.RPN.BBOX_REG_WEIGHTS": ([1, 1, 1, 1],),
    "MODEL.ROI_HEADS.NAME": ("StandardROIHeads", "Res5ROIHeads"),
    "MODEL.ROI_BOX_HEAD.BBOX_REG_WEIGHTS": ([10, 10, 5, 5],),
    "MODEL.ROI_BOX_HEAD.POOLER_TYPE": ("ROIAlign", "ROIAlignV2"),
    "MODEL.ROI_BOX_HEAD.USE_SIGMOID_CE": (False,),
    "INPUT.FORMAT": ("BGR", "RGB"),
}
_PYRAMID_LEVELS = 5


@dataclass(frozen=True)
class Detectron2Config:
    """Settings from a configuration file of detectron2, without those that the file lacks."""

    # Values of `ModelConfig`, and of `InputConfig` below `preprocessing`, by dotted key.
    settings: Settings
    # Pixel statistics and channel order, under the tensor names that `detectron2.ORIGIN` reads.
    statistics: dict[str, Tensor]
    num_classes: int | None


def read_config(path: Path) -> Detectron2Config | None:
    """Read a configuration file of detectron2. Return None if the file has no section `MODEL`.

    Raises:
        WeightsError: the file cannot be read or has invalid values, or this model cannot represent
            a setting.
    """
    values = _values_in(path)
    if not any(key.startswith("MODEL.") for key in values):
        return None
    try:
        return _config_from(path, values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WeightsError(
            f"{path} has an invalid value ({error}); give the config.yaml that detectron2's "
            "training wrote"
        ) from error


def _config_from(path: Path, values: Mapping[str, Any]) -> Detectron2Config:
    """Convert the values of a detectron2 configuration file to a `Detectron2Config`.

    The values are given by dotted key, such as `MODEL.PIXEL_MEAN`.

    Raises:
        WeightsError: this model cannot represent a setting.
        TypeError, ValueError, RuntimeError: a value has another type or shape than in detectron2.
    """
    for key, allowed in {**_FIXED, **_feature_maps(values)}.items():
        if key in values and values[key] not in allowed:
            raise _unsupported(path, key, values[key])
    settings = {ours: values[key] for key, ours in _KEYS.items() if key in values}
    shares_pooler = values.get("MODEL.ROI_HEADS.NAME") == "Res5ROIHeads"
    if shares_pooler:
        settings.pop("roi.mask_pool", None)
        if "roi.box_pool" in settings:
            settings["roi.mask_pool"] = settings["roi.box_pool"]
    # Without a pyramid, this model's res5 is dilated by 2, unless it is the head of each RoI.
    has_single_map = values.get("MODEL.BACKBONE.NAME") == "build_resnet_backbone"
    key = "MODEL.RESNETS.RES5_DILATION"
    if has_single_map and not shares_pooler and values.get(key, 2) != 2:
        raise _unsupported(path, key, values[key])
    for kind in ("POOLER_TYPE", "POOLER_SAMPLING_RATIO"):
        box, mask = (values.get(f"MODEL.ROI_{head}_HEAD.{kind}") for head in ("BOX", "MASK"))
        if not shares_pooler and mask is not None and box not in (None, mask):
            raise _unsupported(path, f"MODEL.ROI_MASK_HEAD.{kind}", mask)
    if "MODEL.ROI_BOX_HEAD.POOLER_TYPE" in values:
        settings["roi.aligned"] = values["MODEL.ROI_BOX_HEAD.POOLER_TYPE"] == "ROIAlignV2"
    for part, key in (("rpn", "MODEL.RPN"), ("roi", "MODEL.ROI_HEADS")):
        limits = values.get(f"{key}.IOU_THRESHOLDS")
        if limits:
            settings[f"{part}.sampling.background_iou"] = limits[0]
            settings[f"{part}.sampling.foreground_iou"] = limits[-1]
    return Detectron2Config(
        settings | _anchors(path, values),
        _statistics(values),
        values.get("MODEL.ROI_HEADS.NUM_CLASSES"),
    )


def _feature_maps(values: Mapping[str, Any]) -> Mapping[str, Sequence[object]]:
    """Return the supported names of the feature maps that the RPN and the heads read.

    The result maps a dotted key, such as `MODEL.RPN.IN_FEATURES`, to the supported values, such as
    `["res4"]`. `values` holds the file's values by dotted key.
    """
    rpn, heads = "MODEL.RPN.IN_FEATURES", "MODEL.ROI_HEADS.IN_FEATURES"
    if values.get("MODEL.ROI_HEADS.NAME") == "Res5ROIHeads":
        return {rpn: (["res4"],), heads: (["res4"],)}
    backbone = values.get("MODEL.BACKBONE.NAME")
    if backbone == "build_resnet_backbone":
        return {rpn: (["res5"],), heads: (["res5"],)}
    pyramid = {rpn: ["p2", "p3", "p4", "p5", "p6"], heads: ["p2", "p3", "p4", "p5"]}
    # A file that does not name its backbone may be for any of the three kinds.
    others = [] if backbone else [["res4"], ["res5"]]
    return {key: (maps, *others) for key, maps in pyramid.items()}


def _values_in(path: Path, heirs: Sequence[Path] = ()) -> dict[str, Any]:
    """Return a file's values by dotted key, including those inherited through its key `_BASE_`.

    `heirs` are the resolved paths of the files that inherit from this one. If `path` is one of
    them, raise WeightsError, because the file inherits from itself.
    """
    if path.resolve() in heirs:
        raise WeightsError(
            f"{path} inherits from itself through _BASE_; set _BASE_ to another file, or remove it"
        )
    try:
        content = value_from_yaml(path.read_bytes())
    except OSError as error:
        raise WeightsError(
            f"cannot read {path}: {error.strerror}; give detectron2's config.yaml"
        ) from None
    except (yaml.YAMLError, UnicodeError) as error:
        reason = " ".join(str(error).split())
        raise WeightsError(
            f"{path} is not YAML ({reason}); give the config.yaml that detectron2's training wrote"
        ) from None
    if not isinstance(content, Mapping):
        return {}
    base = base_config(path, content)
    inherited = _values_in(base, (*heirs, path.resolve())) if base else {}
    return inherited | {key: _decoded(value) for key, value in values_by_key(content).items()}


def _decoded(value: Any) -> Any:
    """If a value is a string that contains a Python literal, return the literal's value.

    detectron2 does the same. A tuple, such as `(0.3, 0.7)`, becomes a list. Any other string, and
    a value that is not a string, is returned unchanged.
    """
    if isinstance(value, str):
        with suppress(ValueError, SyntaxError):
            value = ast.literal_eval(value)
    return [_decoded(item) for item in value] if isinstance(value, (list, tuple)) else value


def _anchors(path: Path, values: Mapping[str, Any]) -> Settings:
    """Return the anchor sizes and aspect ratios of a configuration file, as settings of this model.

    `values` holds the file's values by dotted key. `path` is the file, for the error message.

    Raises:
        WeightsError: a pyramid level has several sizes, or levels have different aspect ratios.
    """
    settings: Settings = {}
    key = "MODEL.ANCHOR_GENERATOR.SIZES"
    if sizes := values.get(key):
        levels = sizes if isinstance(sizes[0], list) else [sizes]
        if str(values.get("MODEL.BACKBONE.NAME", "")).endswith("fpn_backbone") or len(levels) > 1:
            levels = levels * _PYRAMID_LEVELS if len(levels) == 1 else levels
            if any(len(level) != 1 for level in levels):
                raise _unsupported(path, key, sizes)
        settings["anchors.sizes"] = tuple(size for level in levels for size in level)
    key = "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS"
    if ratios := values.get(key):
        levels = ratios if isinstance(ratios[0], list) else [ratios]
        if any(level != levels[0] for level in levels):
            raise _unsupported(path, key, ratios)
        settings["anchors.aspect_ratios"] = tuple(levels[0])
    return settings


def _statistics(values: Mapping[str, Any]) -> dict[str, Tensor]:
    names = {"MODEL.PIXEL_MEAN": "pixel_mean", "MODEL.PIXEL_STD": "pixel_std"}
    statistics = {
        ours: torch.tensor(values[key]).reshape(3) for key, ours in names.items() if key in values
    }
    if "INPUT.FORMAT" in values:
        statistics[IS_BGR] = torch.tensor(values["INPUT.FORMAT"] == "BGR")
    return statistics


def _unsupported(path: Path, key: str, value: object) -> WeightsError:
    return WeightsError(f"{path} sets {key} to {value}; this program does not support this value")
