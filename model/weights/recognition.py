"""Recognition of the program that wrote a weights file, and of the model's architecture."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoint import load_checkpoint
from ..config.overrides import values_by_key
from . import caffe2, detectron2, maskrcnn_benchmark, torchvision
from .detectron2_config import Detectron2Config, read_config
from .downloads import CONFIG_NAME
from .files import WeightsError, read_file
from .layouts import BOX_DELTAS, CLASS_SCORES, MASK_LOGITS, number_box_head
from .origins import Settings, Weights, WeightsOrigin, rename_tensors

ORIGINS = (torchvision.ORIGIN, detectron2.ORIGIN, maskrcnn_benchmark.ORIGIN, caffe2.ORIGIN)
# Name of the origin of checkpoints that this program wrote.
OWN = "maskrcnn-trt"

# Keys under which training programs store the dictionary of tensors.
_WRAPPERS = ("model", "state_dict", "blobs")
_BODY = "backbone.body"
# Variants of ResNet by their number of blocks in `layer3`.
_RESNETS = {2: "resnet18", 6: "resnet50", 23: "resnet101"}
_SUPPORTED = "resnet18, resnet50 and resnet101 are supported"


def read_weights(path: Path, config: Path | None = None) -> Weights:
    """Read a weights file of any supported program, which is recognised by the file's content.

    Args:
        path: the weights file.
        config: detectron2's configuration file of the model. None: for weights of detectron2, use
            `config.yaml` in the folder of the weights if this file exists.

    Raises:
        CheckpointError: the file cannot be read, or is of an unsupported program or model. Or the
            configuration file cannot be read, or does not belong to these weights.
    """
    content = read_file(path)
    if is_checkpoint(content):
        checkpoint = load_checkpoint(path)
        settings = values_by_key(checkpoint.model_config.model_dump())
        return Weights(origin=OWN, tensors=checkpoint.weights, structure=settings, assumed={})
    state = _tensors_in(content)
    if isinstance(content, Mapping) and content.get("__author__") == "torchvision":
        state |= detectron2.TORCHVISION_STATISTICS
    origin = next((o for o in ORIGINS if any(re.fullmatch(o.signature, n) for n in state)), None)
    if origin is None:
        raise WeightsError(
            f"{path} does not hold the weights of a supported program; give weights of "
            f"{', '.join(origin.name for origin in ORIGINS)} or of this program, with a ResNet as "
            "the backbone"
        )
    stated = _config_for(path, origin, config)
    try:
        weights = weights_from_state(state | (stated.statistics if stated else {}), origin)
        return _with_config(weights, stated) if stated else weights
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from None
    except (IndexError, TypeError, RuntimeError) as error:
        raise WeightsError(
            f"{path} has tensor names of {origin.name}, but tensor shapes that no Mask R-CNN has; "
            "give an original weights file, as its training code wrote it"
        ) from error


def _config_for(path: Path, origin: WeightsOrigin, config: Path | None) -> Detectron2Config | None:
    if origin is not detectron2.ORIGIN:
        if config:
            raise WeightsError(
                f"{config} applies only to weights of detectron2, but {path} holds weights of "
                f"{origin.name}; omit --config"
            )
        return None
    if config is None:
        beside = path.with_name(CONFIG_NAME)
        return read_config(beside) if beside.is_file() else None
    stated = read_config(config)
    if stated is None:
        raise WeightsError(f"{config} has no section MODEL; give detectron2's config.yaml")
    return stated


def _with_config(weights: Weights, stated: Detectron2Config) -> Weights:
    classes = weights.structure.get("num_classes")
    if None not in (classes, stated.num_classes) and classes != stated.num_classes:
        raise WeightsError(
            f"the weights have {classes} classes, but their configuration states "
            f"{stated.num_classes} classes; give the config.yaml of this model with --config, or "
            "move another model's config.yaml out of the folder of the weights"
        )
    known = stated.settings | {
        key: weights.assumed[key] for key in stated.statistics if key in weights.assumed
    }
    assumed = {key: value for key, value in weights.assumed.items() if key not in known}
    return replace(weights, structure=known | weights.structure, assumed=assumed)


def is_checkpoint(content: object) -> bool:
    """Whether a file's content is a checkpoint of this program, judged by its keys only.

    A checkpoint with missing or invalid values is recognised, too.
    """
    return isinstance(content, Mapping) and bool({"model_config", "training_state"} & {*content})


def weights_from_state(state: Mapping[str, Tensor], origin: WeightsOrigin) -> Weights:
    """Convert a file's tensors to this program's names and layout, and infer the model's settings.

    Raises:
        WeightsError: the tensors are not of a supported Mask R-CNN or ResNet.
    """
    tensors, ignored = rename_tensors(state, origin)
    tensors = origin.layout(number_box_head(tensors), state)
    structure = infer_structure(tensors)
    assumed = origin.conventions(structure, state)
    if "num_classes" not in structure:
        assumed = {k: v for k, v in assumed.items() if k.startswith(("backbone.", "pixel_"))}
    assumed["preprocessing.resize"] = origin.resize
    return Weights(
        origin=origin.name,
        tensors=tensors,
        structure=structure,
        assumed=assumed,
        # Pixel statistics are not ignored: the settings contain them.
        ignored=tuple(name for name in ignored if not name.startswith("pixel_")),
    )


def _tensors_in(content: Any) -> dict[str, Tensor]:
    """Return the tensors in a file's content by name.

    The prefix `module.` is removed from the names. The content may be wrapped in dictionaries, such
    as `{"state_dict": ...}`.
    """
    for wrapper in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping):
        return {}
    # Remove the prefix `module.`, which data-parallel training adds to every name.
    return {
        re.sub(r"^(?:module\.)+", "", name): _tensor_from(value)
        for name, value in content.items()
        if isinstance(name, str) and _is_numeric(value)
    }


def _is_numeric(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, np.ndarray) and value.dtype.kind in "fiu"
    )


def _tensor_from(value: Tensor | np.ndarray[Any, Any]) -> Tensor:
    """Return an array or tensor as a tensor. Floating-point values are converted to float32."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value.astype(value.dtype.newbyteorder("=")))
    return value.detach().float() if value.is_floating_point() else value.detach()


def infer_structure(tensors: Mapping[str, Tensor]) -> Settings:
    """Infer architecture settings from the names and shapes of a model's tensors.

    The tensors must have the names of this program's model, as `rename_tensors` returns them.

    Raises:
        WeightsError: the tensors are not of a supported model.
    """
    settings = _body_settings(tensors)
    if f"{CLASS_SCORES}.weight" in tensors:
        settings |= _feature_settings(tensors) | _head_settings(tensors)
        convs = _count(r"rpn\.head\.conv\.(\d+)\.0\.weight", tensors)
        settings["rpn.conv_depth"] = max(1, convs)
    return settings


def _body_settings(tensors: Mapping[str, Tensor]) -> Settings:
    blocks = _count(rf"{_BODY}\.layer3\.(\d+)\.conv1\.weight", tensors)
    name = _RESNETS.get(blocks)
    if name is None:
        raise WeightsError(f"the backbone has {blocks} blocks in {_BODY}.layer3; only {_SUPPORTED}")
    if (name == "resnet18") != (f"{_BODY}.layer3.0.conv3.weight" not in tensors):
        raise WeightsError(f"the blocks of {_BODY} are not those of {name}; only {_SUPPORTED}")
    norm = _norm(f"{_BODY}.bn1", tensors)
    counted = f"{_BODY}.bn1.num_batches_tracked" in tensors
    return {
        "backbone.name": name,
        "backbone.norm": "frozen_bn" if norm == "bn" and not counted else norm,
    }


def _feature_settings(tensors: Mapping[str, Tensor]) -> Settings:
    inner = tensors.get("backbone.fpn.inner_blocks.0.0.weight")
    if inner is not None:
        return {
            "backbone.features": "fpn",
            "backbone.fpn_channels": len(inner),
            "backbone.fpn_norm": _norm("backbone.fpn.inner_blocks.0.1", tensors),
        }
    shared = any(name.startswith("roi_heads.shared_head.") for name in tensors)
    return {"backbone.features": "c4" if shared else "c5"}


def _head_settings(tensors: Mapping[str, Tensor]) -> Settings:
    deltas, masks = (tensors.get(f"{name}.weight") for name in (BOX_DELTAS, MASK_LOGITS))
    if deltas is None or masks is None:
        raise WeightsError(
            "the weights lack the box regression or the mask head; give the weights of a whole "
            "Mask R-CNN"
        )
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
    """Return the number of layers, given a regular expression that captures layer indices.

    The number is the largest index captured in a tensor name plus 1, or 0 if no name matches.
    """
    matches = (re.fullmatch(pattern, name) for name in tensors)
    return 1 + max((int(match[1]) for match in matches if match), default=-1)
