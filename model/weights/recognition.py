"""From a file, whatever program wrote it, to weights under our names."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoint import load_checkpoint
from . import caffe2, detectron2, maskrcnn_benchmark, torchvision
from .files import WeightsError, read_file
from .layouts import number_box_head
from .origins import Origin, Weights, renamed
from .structure import structure_of

ORIGINS = (torchvision.ORIGIN, detectron2.ORIGIN, maskrcnn_benchmark.ORIGIN, caffe2.ORIGIN)
OWN = "maskrcnn-trt"
"""Name of the origin of checkpoints that this program wrote."""

_WRAPPERS = ("model", "state_dict", "blobs")


def read_weights(path: Path) -> Weights:
    """Weights of a file of any origin, recognised by its content.

    Raises:
        CheckpointError: the file cannot be read, or is of no known origin or model.
    """
    content = read_file(path)
    if isinstance(content, Mapping) and "model_config" in content:
        return _own_weights(path)
    state = _tensors_in(content)
    if isinstance(content, Mapping) and content.get("__author__") == "torchvision":
        state |= detectron2.TORCHVISION_STATISTICS
    origin = _origin_of(state)
    if origin is None:
        raise WeightsError(
            f"{path} holds no weights of a known origin; give those of "
            f"{', '.join(origin.name for origin in ORIGINS)} or of this program"
        )
    try:
        return weights_from_state(state, origin)
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from None
    except (IndexError, TypeError, RuntimeError) as error:
        raise WeightsError(
            f"{path} has names of {origin.name}, but tensors of shapes that no Mask R-CNN has; "
            "give a file that its training wrote"
        ) from error


def weights_from_state(state: Mapping[str, Tensor], origin: Origin) -> Weights:
    """Weights under our names and in our layout.

    Raises:
        WeightsError: they are not of a Mask R-CNN or residual network that this program knows.
    """
    tensors, left_over = renamed(state, origin)
    tensors = origin.layout(number_box_head(tensors), state)
    structure = structure_of(tensors)
    assumed = origin.conventions(structure, state)
    if "num_classes" not in structure:
        assumed = {k: v for k, v in assumed.items() if k.startswith(("backbone.", "pixel_"))}
    return Weights(
        origin=origin.name,
        tensors=tensors,
        structure=structure,
        assumed=assumed,
        # Pixel statistics are among the settings.
        left_over=tuple(name for name in left_over if not name.startswith("pixel_")),
    )


def _own_weights(path: Path) -> Weights:
    checkpoint = load_checkpoint(path)
    settings = _flattened(checkpoint.model_config.model_dump())
    return Weights(origin=OWN, tensors=checkpoint.weights, structure=settings, assumed={})


def _flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= (
            _flattened(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return flat


def _origin_of(state: Mapping[str, Tensor]) -> Origin | None:
    for origin in ORIGINS:
        if any(re.fullmatch(origin.signature, name) for name in state):
            return origin
    return None


def _tensors_in(content: Any) -> dict[str, Tensor]:
    """Tensors by name, out of what a training program wrapped around them."""
    for wrapper in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping):
        return {}
    # `module.` is what data parallel training puts before every name.
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
    """In single precision, if not whole numbers, and in memory of its own."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value.astype(value.dtype.newbyteorder("=")))
    return value.detach().float() if value.is_floating_point() else value.detach()
