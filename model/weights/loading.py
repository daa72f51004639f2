"""Weights that a training starts from: loaded as far as they fit, refused where they mislead."""

import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from torch import Tensor

from ..config import ModelConfig
from ..mask_rcnn import MaskRCNN
from ..overrides import value_at
from .files import WeightsError
from .layouts import CLASS_ROWS
from .origins import Weights, listed
from .recognition import read_weights

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
    path = fetched(str(source)) if re.match("https?://", str(source)) else Path(source)
    weights = read_weights(path)
    conflicts = list(_conflicts(weights, model.config))
    if conflicts:
        raise WeightsError(
            f"weights: {path} holds another `model`, of {weights.origin}; set "
            f"{' '.join(f'model.{key}={_yaml_from(value)}' for key, value in conflicts)}"
        )
    expected = model.state_dict()
    fitting = {
        name: tensor
        for name, tensor in _tensors_for(model.config, weights).items()
        if name in expected and not (name in CLASS_ROWS and tensor.shape != expected[name].shape)
    }
    absent = [n for n in expected if n not in fitting and not n.endswith("num_batches_tracked")]
    _check_whole_modules(path, fitting, absent)
    try:
        model.load_state_dict(fitting, strict=False)
    except RuntimeError as error:
        raise WeightsError(f"weights: {path} does not fit: {str(error).split(': ')[-1]}") from None
    return LoadReport(
        origin=weights.origin,
        taken=len(fitting),
        initialised=tuple(dict.fromkeys(_module_of(name) for name in absent)),
        left_over=(*weights.left_over, *(n for n in weights.tensors if n not in fitting)),
    )


def fetched(url: str) -> Path:
    """File behind an address, downloaded once into torch.hub's cache.

    A hash in the file's name, as in `resnet50-0676ba61.pth`, is checked.

    Raises:
        WeightsError: the download failed, or the hash differs.
    """
    name = Path(urlparse(url).path).name
    path = Path(torch.hub.get_dir()) / "checkpoints" / name
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = re.search(r"-([0-9a-f]{8,})\.", name)
    try:
        torch.hub.download_url_to_file(
            url, str(path), digest[1] if digest else None, progress=sys.stderr.isatty()
        )
    except (OSError, RuntimeError) as error:
        raise WeightsError(
            f"{url} could not be downloaded ({error}); download it by hand and give the file"
        ) from None
    return path


def _conflicts(weights: Weights, config: ModelConfig) -> Iterator[tuple[str, Any]]:
    """Settings of the weights that a configuration has otherwise."""
    merged = _is_merged(weights.tensors)
    for key, value in weights.settings.items():
        if key not in _COMPUTED_BY or (key == "backbone.norm_eps" and merged):
            continue
        if not _same(key, value, value_at(config, key)):
            yield key, value


def _same(key: str, value: Any, other: Any) -> bool:
    if key == "pixel_mean":
        return all(abs(a - b) <= _SAME_GREY for a, b in zip(value, other, strict=True))
    if key == "backbone.norm":  # with fixed or with moving statistics, it is batch norm
        return bool(value == other or {value, other} == {"bn", "frozen_bn"})
    if isinstance(value, float):
        return math.isclose(value, other, abs_tol=1e-9)
    return bool(value == other)


def _is_merged(tensors: Mapping[str, Tensor]) -> bool:
    """Whether batch norms are scale and shift alone, so that epsilon has nothing to say."""
    pairs = {"running_mean": 0, "running_var": 1}
    statistics = [(n, t) for n, t in tensors.items() if n.endswith(tuple(pairs))]
    return all(bool((t == pairs[n.rpartition(".")[2]]).all()) for n, t in statistics)


def _tensors_for(config: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    """Tensors where this model has them, normalising exactly as at their origin."""
    tensors = dict(weights.tensors)
    if config.backbone.features == "c4":
        tensors = {
            name.replace("backbone.body.layer4.", "roi_heads.shared_head."): tensor
            for name, tensor in tensors.items()
        }
    if _is_merged(tensors):
        for name in tensors:
            if name.endswith("running_var"):
                tensors[name] = tensors[name] - config.backbone.norm_eps
    return tensors


def _module_of(name: str) -> str:
    """What is reported of a tensor: its layer, or the part of the model it is in."""
    if name in CLASS_ROWS:
        return name.rpartition(".")[0]
    return ".".join(name.split(".")[:2])


def _check_whole_modules(path: Path, fitting: Mapping[str, Tensor], absent: list[str]) -> None:
    """Make sure that a module is loaded whole or not at all.

    Raises:
        WeightsError: one is neither.
    """
    begun = {_module_of(name) for name in fitting}
    broken = [name for name in absent if _module_of(name) in begun]
    if broken or "backbone.body" not in begun:
        raise WeightsError(f"weights: {path} lacks {listed(broken or absent)}; it is incomplete")


def _yaml_from(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{','.join(map(_yaml_from, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
