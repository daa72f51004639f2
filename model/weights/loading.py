"""Loading of weights of any supported program into models, for training and `torch.hub`."""

import math
import shlex
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from ..config.error_messages import validation_message
from ..config.reference import text_from_value
from ..config.schema import ModelConfig
from ..mask_rcnn import MaskRCNN
from ..plurals import abbreviated
from .conversion import check_shapes
from .files import WeightsError
from .layouts import CLASS_ROWS
from .origins import Weights
from .references import check_finite, checkpoint_from_reference, read_reference

# Settings of `ModelConfig` that must have the same values as in the training of the weights.
_MEANING_SETTINGS = (
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

# Largest difference between pixel means (0..255) that count as equal: ImageNet's published means
# vary.
_PIXEL_MEAN_TOLERANCE = 1.0
# Backbones of the functions in `hubconf.py`.
_HUB_BACKBONES = ("resnet50", "resnet101")


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Report of loading a weights file into a model."""

    origin: str
    # Number of the model's tensors that were loaded.
    num_loaded: int
    # Names of modules and layers that keep their initial values.
    initialised: tuple[str, ...]
    # Names of tensors in the file that the model does not need.
    ignored: tuple[str, ...]

    def __str__(self) -> str:
        rest = f"; left as initialised: {', '.join(self.initialised)}" if self.initialised else ""
        extra = f"; not needed: {abbreviated(self.ignored)}" if self.ignored else ""
        return f"{self.num_loaded} tensors of {self.origin}{rest}{extra}"


def load_weights(model: MaskRCNN, source: str | Path) -> LoadReport:
    """Load weights of any supported program into a model.

    If the file lacks a head of the model, the model's head keeps its values. If a predictor in the
    file has another number of classes, the model's predictor keeps its values.

    Args:
        model: model to load the weights into.
        source: path or http(s) URL of a checkpoint or weights file, name of a published model, or
            torchvision's name of its weights.

    Returns:
        Report of the tensors that were loaded, kept and ignored.

    Raises:
        CheckpointError: the file cannot be read or is incomplete, its weights need another model
            configuration, or a weight is NaN or infinite.
        ZooError: no published model has this name, or this program does not support the model.
        DownloadError: the download failed, or the file has another checksum.
    """
    weights = read_reference(source)
    _check_conventions(source, weights, model.config)
    expected = model.state_dict()
    fitting = {
        name: tensor
        for name, tensor in _tensors_for(model.config, weights).items()
        if name in expected and not (name in CLASS_ROWS and tensor.shape != expected[name].shape)
    }
    absent = [n for n in expected if n not in fitting and not n.endswith("num_batches_tracked")]
    loaded_modules = {_module_of(name) for name in fitting}
    # A module may be absent as a whole. If only a part of a module is absent, the file is
    # incomplete.
    broken = [n for n in absent if _module_of(n) in loaded_modules and n not in CLASS_ROWS]
    if broken or "backbone.body" not in loaded_modules:
        lacking = abbreviated(broken or absent)
        raise WeightsError(f"weights: {source} lacks the tensors {lacking}; give a complete file")
    try:
        check_shapes(fitting, expected)
    except WeightsError as error:
        raise WeightsError(f"weights: {source}: {error}") from None
    check_finite(source, fitting)
    model.load_state_dict(fitting, strict=False)
    parts = (
        n.rpartition(".")[0] if _module_of(n) in loaded_modules else _module_of(n) for n in absent
    )
    return LoadReport(
        origin=weights.origin,
        num_loaded=len(fitting),
        initialised=tuple(dict.fromkeys(parts)),
        ignored=(*weights.ignored, *(n for n in weights.tensors if n not in fitting)),
    )


def build_model(
    name: str, features: str, source: str | Path | None = None, num_classes: int = 80
) -> MaskRCNN:
    """Build a model in evaluation mode on the CPU, with weights of any supported program.

    Args:
        name: variant of ResNet, such as `resnet50`; see `BackboneConfig.name`.
        features: feature maps that the heads use, such as `fpn`; see `BackboneConfig.features`.
        source: path or http(s) URL of a checkpoint or of another program's weights, or name of a
            published model. None: random weights.
        num_classes: number of foreground classes of a model with random weights.

    Raises:
        ValueError: `source` is None, and `name`, `features` or `num_classes` is invalid.
        CheckpointError: the weights cannot be read or converted, have NaN or infinite values, or
            are for another backbone.
        ZooError: no published model has this name, or this program does not support the model.
        DownloadError: the download failed, or the file has another checksum.
    """
    if source is None:
        values = {"num_classes": num_classes, "backbone": {"name": name, "features": features}}
        # C4 pools 14 x 14 cells, because res5, its box head, halves the resolution.
        roi = {"roi": {"box_pool": 14}} if features == "c4" else {}
        try:
            config = ModelConfig.model_validate(values | roi)
        except ValidationError as error:
            raise ValueError(validation_message(error, ModelConfig)) from None
        return MaskRCNN(config).eval()
    checkpoint = checkpoint_from_reference(source)
    backbone = checkpoint.model_config.backbone
    if (backbone.name, backbone.features) != (name, features):
        remedy = (
            f"call maskrcnn_{backbone.name}_{backbone.features}() instead"
            if backbone.name in _HUB_BACKBONES
            else "torch.hub has no function for this backbone"
        )
        raise WeightsError(
            f"{source} has the backbone {backbone.name} {backbone.features}, but "
            f"maskrcnn_{name}_{features}() needs the backbone {name} {features}; {remedy}"
        )
    return checkpoint.build_model()


def _check_conventions(source: str | Path, weights: Weights, config: ModelConfig) -> None:
    """Check that a configuration agrees with the one that the weights were trained with.

    Only settings that change the meaning of the weights are compared, such as the pixel mean
    (`_MEANING_SETTINGS`). `source` is the reference of the weights, for the error message.

    Raises:
        WeightsError: settings differ; the message lists the settings to use.
    """
    merged = _has_merged_norms(weights)
    conflicts = {
        key: value
        for key, value in weights.settings.items()
        if key in _MEANING_SETTINGS
        and not (key == "backbone.norm_eps" and merged)
        and not _is_equivalent(key, value, attrgetter(key)(config))
    }
    if conflicts:
        settings = shlex.join(f"model.{k}={text_from_value(v)}" for k, v in conflicts.items())
        raise WeightsError(
            f"weights: {source} of {weights.origin} was trained with other settings than those of "
            f"the configuration; set {settings}"
        )


def _is_equivalent(key: str, value: Any, other: Any) -> bool:
    if key == "pixel_mean":
        return all(abs(a - b) <= _PIXEL_MEAN_TOLERANCE for a, b in zip(value, other, strict=True))
    if key == "backbone.norm":  # frozen batch norm has the same tensors as batch norm
        return bool(value == other or {value, other} == {"bn", "frozen_bn"})
    if isinstance(value, float):
        return math.isclose(value, other, abs_tol=1e-9)
    return bool(value == other)


def _has_merged_norms(weights: Weights) -> bool:
    """Whether the statistics of all batch norms are merged into scale and shift.

    If so, all batch norms have mean 0, variance 1 and epsilon 0.
    """
    values = {"running_mean": 0, "running_var": 1}
    statistics = [(n, t) for n, t in weights.tensors.items() if n.endswith(tuple(values))]
    return (
        weights.settings["backbone.norm_eps"] == 0
        and bool(statistics)
        and all(bool((t == values[n.rpartition(".")[2]]).all()) for n, t in statistics)
    )


def _tensors_for(config: ModelConfig, weights: Weights) -> dict[str, Tensor]:
    """Return the tensors of `weights`, named as in a model with the configuration `config`.

    Batch norms that only scale and shift (mean 0, variance 1, epsilon 0) get a variance of 1 minus
    the model's epsilon, so that their results do not change.
    """
    tensors = dict(weights.tensors)
    if config.backbone.features == "c4":
        tensors = {
            name.replace("backbone.body.layer4.", "roi_heads.shared_head."): tensor
            for name, tensor in tensors.items()
        }
    if _has_merged_norms(weights):
        # The model adds its epsilon to the variance. Subtract the epsilon, so that their sum is 1.
        for name in tensors:
            if name.endswith("running_var"):
                tensors[name] = tensors[name] - config.backbone.norm_eps
    return tensors


def _module_of(name: str) -> str:
    """Return the first two components of a tensor name, such as `roi_heads.box_head`."""
    return ".".join(name.split(".")[:2])
