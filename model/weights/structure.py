"""The architecture that tensors under our names belong to."""

import math
import re
from collections.abc import Mapping

from torch import Tensor

from .files import WeightsError
from .layouts import BOX_DELTAS, CLASS_SCORES, MASK_LOGITS
from .origins import Settings

_BODY = "backbone.body"
_BLOCKS = {2: "resnet18", 6: "resnet50", 23: "resnet101"}
_SUPPORTED = "resnet18, resnet50 and resnet101 are supported"


def structure_of(tensors: Mapping[str, Tensor]) -> Settings:
    """Settings that names and shapes tell.

    Raises:
        WeightsError: they belong to no model of ours.
    """
    settings = _body(tensors)
    if f"{CLASS_SCORES}.weight" in tensors:
        settings |= _features(tensors) | _rpn(tensors) | _heads(tensors)
    return settings


def _body(tensors: Mapping[str, Tensor]) -> Settings:
    blocks = _count(rf"{_BODY}\.layer3\.(\d+)\.conv1\.weight", tensors)
    name = _BLOCKS.get(blocks)
    if name is None:
        raise WeightsError(f"the third stage has {blocks} blocks; only {_SUPPORTED}")
    if (name == "resnet18") != (f"{_BODY}.layer3.0.conv3.weight" not in tensors):
        raise WeightsError(f"the blocks are not those of {name}; only {_SUPPORTED}")
    norm = _norm(f"{_BODY}.bn1", tensors)
    counted = f"{_BODY}.bn1.num_batches_tracked" in tensors
    return {
        "backbone.name": name,
        "backbone.norm": "frozen_bn" if norm == "bn" and not counted else norm,
    }


def _features(tensors: Mapping[str, Tensor]) -> Settings:
    inner = tensors.get("backbone.fpn.inner_blocks.0.0.weight")
    if inner is not None:
        return {
            "backbone.features": "fpn",
            "backbone.fpn_channels": len(inner),
            "backbone.fpn_norm": _norm("backbone.fpn.inner_blocks.0.1", tensors),
        }
    shared = any(name.startswith("roi_heads.shared_head.") for name in tensors)
    return {"backbone.features": "c4" if shared else "c5"}


def _rpn(tensors: Mapping[str, Tensor]) -> Settings:
    return {"rpn.conv_depth": max(1, _count(r"rpn\.head\.conv\.(\d+)\.0\.weight", tensors))}


def _heads(tensors: Mapping[str, Tensor]) -> Settings:
    deltas, masks = (tensors.get(f"{name}.weight") for name in (BOX_DELTAS, MASK_LOGITS))
    if deltas is None or masks is None:
        raise WeightsError("there is no box regression or no mask head; give a Mask R-CNN")
    settings: Settings = {
        "num_classes": len(tensors[f"{CLASS_SCORES}.weight"]) - 1,
        "roi.mask_head_dim": masks.shape[1],
    }
    convs = _count(r"roi_heads\.box_head\.(\d+)\.0\.weight", tensors)
    first = tensors.get(f"roi_heads.box_head.{convs + 1 if convs else 'fc6'}.weight")
    if first is None:
        return settings
    stem = "backbone.fpn.layer_blocks.0.0.weight"
    channels = len(tensors[stem]) if stem in tensors else 2048
    return settings | {
        "roi.box_head_convs": convs,
        "roi.box_head_dim": len(first),
        "roi.box_pool": math.isqrt(first.shape[1] // channels),
        "roi.mask_head_depth": _count(r"roi_heads\.mask_head\.(\d+)\.0\.weight", tensors),
        "roi.head_norm": _norm("roi_heads.mask_head.0.1", tensors),
    }


def _norm(module: str, tensors: Mapping[str, Tensor]) -> str:
    if f"{module}.running_mean" in tensors:
        return "bn"
    return "gn" if f"{module}.weight" in tensors else "none"


def _count(pattern: str, tensors: Mapping[str, Tensor]) -> int:
    """How many numbers, from 0 on, a pattern finds."""
    matches = (re.fullmatch(pattern, name) for name in tensors)
    return 1 + max((int(match[1]) for match in matches if match), default=-1)
