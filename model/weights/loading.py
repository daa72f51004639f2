"""Weights that a training starts from: loaded as far as they fit, refused where they mislead."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ..config import ModelConfig
from ..mask_rcnn import MaskRCNN
from ..overrides import text_from_value, value_at
from .conversion import check_shapes
from .files import WeightsError
from .layouts import CLASS_ROWS
from .origins import Weights, listed
from .recognition import read_weights
from .sources import local_path

_COMPUTED_BY = (
    "pixel_mean",
    "pixel_std",
    "inclusive_boxes",
    "backbone.name",
    "backbone.features",
    "backbone.norm",
    "backbone.norm_eps",
    "backbone.stride_in_1x1",
    "backbone.fpn_channels",
    "backbone.fpn_norm",
    "anchors.sizes",
    "anchors.aspect_ratios",
    "anchors.convention",
    "rpn.conv_depth",
    "roi.box_pool",
    "roi.box_head_convs",
    "roi.box_head_dim",
    "roi.mask_head_dim",
    "roi.mask_head_depth",
    "roi.head_norm",
    "roi.sampling_ratio",
    "roi.aligned",
)
"""Settings without which weights mean something else."""

# The means in use for ImageNet differ by less, which no training notices.
_SAME_GREY = 1.0


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What became of a file that was loaded into a model."""

    origin: str
    taken: int
    """Tensors of the model that are now the file's."""
    initialised: tuple[str, ...]
    """Modules, or tensors whose shape depends on the classes, that the file has nothing for."""
    left_over: tuple[str, ...]
    """Names in the file that the model does not need."""

    def __str__(self) -> str:
        rest = f"; left as initialised: {', '.join(self.initialised)}" if self.initialised else ""
        extra = f"; not needed: {listed(self.left_over)}" if self.left_over else ""
        return f"{self.taken} tensors of {self.origin}{rest}{extra}"


def load_weights(model: MaskRCNN, source: str | Path) -> LoadReport:
    """Load a file of any origin, or of an http(s) address, into a model.

    Heads that the file has not, and predictors of another number of classes, stay as they are.

    Raises:
        CheckpointError: the file cannot be had or read, or was made for another configuration.
    """
    path = local_path(source)
    weights = read_weights(path)
    _check_conventions(path, weights, model.config)
    expected = model.state_dict()
    fitting = {
        name: tensor
        for name, tensor in _tensors_for(model.config, weights).items()
        if name in expected and not (name in CLASS_ROWS and tensor.shape != expected[name].shape)
    }
    absent = [n for n in expected if n not in fitting and not n.endswith("num_batches_tracked")]
    begun = {_part_of(name) for name in fitting}
    broken = [n for n in absent if _part_of(n) in begun and n not in CLASS_ROWS]
    if broken or "backbone.body" not in begun:
        raise WeightsError(f"weights: {path} lacks {listed(broken or absent)}; it is incomplete")
    try:
        check_shapes(fitting, expected)
    except WeightsError as error:
        raise WeightsError(f"weights: {path}: {error}") from None
    model.load_state_dict(fitting, strict=False)
    parts = (n.rpartition(".")[0] if _part_of(n) in begun else _part_of(n) for n in absent)
    return LoadReport(
        origin=weights.origin,
        taken=len(fitting),
        initialised=tuple(dict.fromkeys(parts)),
        left_over=(*weights.left_over, *(n for n in weights.tensors if n not in fitting)),
    )


def _check_conventions(path: Path, weights: Weights, config: ModelConfig) -> None:
    """Make sure that a configuration computes as the weights' origin did.

    Raises:
        WeightsError: it does not; the message says what to set.
    """
    merged = _is_merged(weights)
    conflicts = {
        key: value
        for key, value in weights.settings.items()
        if key in _COMPUTED_BY
        and not (key == "backbone.norm_eps" and merged)
        and not _same(key, value, value_at(config, key))
    }
    if conflicts:
        wanted = " ".join(f"model.{k}={text_from_value(v)}" for k, v in conflicts.items())
        raise WeightsError(
            f"weights: {path} holds another `model`, of {weights.origin}; set {wanted}"
        )


def _same(key: str, value: Any, other: Any) -> bool:
    if key == "pixel_mean":
        return all(abs(a - b) <= _SAME_GREY for a, b in zip(value, other, strict=True))
    if key == "backbone.norm":  # with fixed or with moving statistics, it is batch norm
        return bool(value == other or {value, other} == {"bn", "frozen_bn"})
    if isinstance(value, float):
        return math.isclose(value, other, abs_tol=1e-9)
    return bool(value == other)


def _is_merged(weights: Weights) -> bool:
    """Whether batch norms are scale and shift alone, to which any epsilon can be fitted."""
    values = {"running_mean": 0, "running_var": 1}
    statistics = [(n, t) for n, t in weights.tensors.items() if n.endswith(tuple(values))]
    return (
        weights.settings["backbone.norm_eps"] == 0
        and bool(statistics)
        and all(bool((t == values[n.rpartition(".")[2]]).all()) for n, t in statistics)
    )


def _tensors_for(config: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    """Tensors where this model has them, normalising exactly as at their origin."""
    tensors = dict(weights.tensors)
    if config.backbone.features == "c4":
        tensors = {
            name.replace("backbone.body.layer4.", "roi_heads.shared_head."): tensor
            for name, tensor in tensors.items()
        }
    if _is_merged(weights):
        for name in tensors:
            if name.endswith("running_var"):
                tensors[name] = tensors[name] - config.backbone.norm_eps
    return tensors


def _part_of(name: str) -> str:
    """Part of the model that a tensor is in, as `roi_heads.box_head`."""
    return ".".join(name.split(".")[:2])
