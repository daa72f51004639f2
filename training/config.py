"""Configuration of a training run: schema, loading from YAML and `key.path=value` overrides."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from ..model.bundle.spec import ShapeBucket
from ..model.config.error_messages import validation_message
from ..model.config.overrides import OverrideError
from ..model.config.schema import FrozenConfig, ModelConfig
from .config_sources import SourceError, Values, read_values


class ConfigError(Exception):
    """Invalid configuration: unknown key, invalid value, or value that does not fit the run."""


class DatasetConfig(FrozenConfig):
    """A data set in COCO format."""

    images: Path
    """Folder with the image files."""
    annotations: Path
    """COCO instances JSON file."""


class DataConfig(FrozenConfig):
    """Training and validation sets, and preprocessing of their images."""

    train: DatasetConfig
    """Training set."""
    val: DatasetConfig | None = None
    """Validation set. None: no evaluation."""
    min_size: int = Field(800, ge=32)
    """Shorter side of resized images in pixels (smaller if `max_size` limits the longer side)."""
    max_size: int = Field(1333, ge=32)
    """Upper limit of the longer side of resized images in pixels."""
    buckets: tuple[ShapeBucket, ...] = (ShapeBucket(800, 1344), ShapeBucket(1344, 800))
    """Shape buckets: heights and widths to which resized images are padded. All images of a batch
    have the same bucket."""
    flip_probability: float = Field(0.5, ge=0, le=1)
    """Probability that a training image is flipped horizontally."""
    on_broken: Literal["skip", "refuse"] = "skip"
    """Unreadable images and invalid annotations: skip them with a warning, or stop the run."""
    keep_empty: bool = False
    """Also train on images without annotations."""
    workers: int = Field(2, ge=0)
    """Data-loading processes. 0: load in the training process."""
    decode: Literal["workers", "device"] = "workers"
    """JPEG decoding, resize and flip: in the data-loading processes, or on the training device to
    free CPU cores. The processes then decode only files that the device cannot."""

    @model_validator(mode="after")
    def _check_sizes(self) -> "DataConfig":
        if self.max_size < self.min_size:
            raise ValueError(f"max_size {self.max_size} is below min_size {self.min_size}")
        for bucket in self.buckets:
            if bucket.height % 32 or bucket.width % 32:
                raise ValueError(f"sides of bucket {bucket} are not multiples of 32")
        for sides in ((self.min_size, self.max_size), (self.max_size, self.min_size)):
            if not any(b.height >= sides[0] and b.width >= sides[1] for b in self.buckets):
                raise ValueError(f"no bucket holds an image of {sides[0]}x{sides[1]} pixels")
        return self


class SolverConfig(FrozenConfig):
    """Optimiser and learning-rate schedule (warm-up, then multi-step decay)."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    """SGD with momentum, as in detectron2, or AdamW, which converges faster from random weights."""
    images_per_batch: int = Field(16, ge=1)
    """Images per optimiser step: total over all ranks and accumulated passes."""
    accumulate: int = Field(1, ge=1)
    """Forward and backward passes per optimiser step. More passes need less memory."""
    scale_from_batch: int | None = Field(None, ge=1)
    """Images per step for which `base_lr`, `max_iterations`, `steps` and `warmup_iterations` are
    given. They are scaled linearly to `images_per_batch` (Goyal et al., 2017). None: no scaling.
    After scaling, the loaded configuration contains None."""
    base_lr: float = Field(0.02, gt=0)
    """Learning rate after warm-up."""
    bias_lr_factor: float = Field(1.0, gt=0)
    """Factor by which the learning rate of biases is multiplied."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of SGD, or the first beta of AdamW."""
    weight_decay: float = Field(1e-4, ge=0)
    """Weight decay of layer weights. Biases and normalisation parameters have none."""
    max_iterations: int = Field(90000, ge=1)
    """Number of optimiser steps of the run."""
    steps: tuple[int, ...] = (60000, 80000)
    """Iterations at which the learning rate is multiplied by `gamma`."""
    gamma: float = Field(0.1, gt=0, le=1)
    """Factor by which the learning rate is multiplied at each of `steps`."""
    warmup_iterations: int = Field(500, ge=0)
    """Length of the warm-up in iterations."""
    warmup_factor: float = Field(1 / 3, ge=0, le=1)
    """Initial learning rate, as a fraction of `base_lr`."""
    warmup_method: Literal["linear", "constant"] = "linear"
    """Learning rate during warm-up: rising linearly to `base_lr`, or constant at its initial
    value."""
    freeze_backbone_after_epoch: int | None = Field(None, ge=0)
    """Number of epochs after which the whole ResNet (not the FPN) is frozen. None: never."""
    clip_gradient_norm: float | None = Field(None, gt=0)
    """Upper limit of the L2 norm of all gradients together. None: no clipping."""

    @model_validator(mode="after")
    def _check_batch(self) -> "SolverConfig":
        if self.images_per_batch % self.accumulate:
            raise ValueError(
                f"images_per_batch {self.images_per_batch} is not divisible by accumulate "
                f"{self.accumulate}"
            )
        if list(self.steps) != sorted(set(self.steps)):
            raise ValueError(f"steps {list(self.steps)} are not in ascending order")
        return self

    def scaled(self) -> "SolverConfig":
        """Return the configuration with its schedule scaled to `images_per_batch`.

        With ratio = `images_per_batch` / `scale_from_batch`, the learning rate is multiplied by the
        ratio, and all numbers of iterations are divided by it.

        Raises:
            ValueError: Two of `steps` are equal after rounding.
        """
        if self.scale_from_batch is None:
            return self
        ratio = self.images_per_batch / self.scale_from_batch
        steps = tuple(round(step / ratio) for step in self.steps)
        if len(set(steps)) < len(steps):
            raise ValueError(
                f"steps {list(self.steps)} become {list(steps)} when scaled from "
                f"{self.scale_from_batch} to {self.images_per_batch} images_per_batch"
            )
        scaled = {
            "scale_from_batch": None,
            "base_lr": self.base_lr * ratio,
            "max_iterations": max(1, round(self.max_iterations / ratio)),
            "steps": steps,
            "warmup_iterations": round(self.warmup_iterations / ratio),
        }
        return self.model_copy(update=scaled)


EvaluatorName = Literal["pycocotools", "faster-coco-eval"]

_METRIC = re.compile("(bbox|segm)/(AP|AP50|AP75|AR1|AR10|AR100|A[PR][sml]|AP/.+)")


class EvaluationConfig(FrozenConfig):
    """COCO evaluation of the validation set."""

    period: int = Field(0, ge=0)
    """Iterations between evaluations. 0: evaluate only at the end of training."""
    per_epoch: bool = False
    """Also evaluate after every epoch."""
    min_bbox_ap: float | None = Field(None, ge=0, le=1)
    """Stop early when an evaluation reaches this box AP (and `min_mask_ap`, if set)."""
    min_mask_ap: float | None = Field(None, ge=0, le=1)
    """Stop early when an evaluation reaches this mask AP (and `min_bbox_ap`, if set)."""
    skip_test: bool = False
    """Skip all evaluations during and after training."""
    skip_eval: bool = False
    """Write the detections on the validation set to files, but compute no metrics."""
    expected: dict[str, float] = Field(default_factory=dict)
    """Minimum metrics of the final evaluation, as in {bbox/AP: 0.377}. If one is lower, the command
    fails with exit code 1."""
    tolerance: float = Field(0.001, ge=0)
    """Accepted shortfall of a metric from its value in `expected`."""
    images_per_batch: int = Field(8, ge=1)
    """Inference batch size per rank."""
    evaluator: EvaluatorName = "pycocotools"
    """Library that computes the metrics. Both give equal metrics; faster-coco-eval is faster."""

    @model_validator(mode="after")
    def _check_targets(self) -> "EvaluationConfig":
        stops_early = self.min_bbox_ap is not None or self.min_mask_ap is not None
        if stops_early and not (self.per_epoch or self.period or self.skip_test):
            raise ValueError(
                "min_bbox_ap and min_mask_ap need evaluations during training; set per_epoch=true "
                "or period"
            )
        return self

    @model_validator(mode="after")
    def _check_expected(self) -> "EvaluationConfig":
        for name in self.expected:
            if not _METRIC.fullmatch(name):
                raise ValueError(
                    f"expected has the unknown metric {name!r}; metrics are bbox/M and segm/M with "
                    "M one of AP, AP50, AP75, APs, APm, APl, AR1, AR10, AR100, ARs, ARm, ARl or "
                    "AP/CLASS"
                )
        if self.expected and self.skip_eval:
            raise ValueError(
                "expected needs metrics, which skip_eval=true skips; remove it, or set expected={}"
            )
        return self


class TrainConfig(FrozenConfig):
    """Configuration of a training run.

    In a YAML file, the key `base` names a preset or another file (relative to this one), which
    supplies the keys that this file does not set.
    """

    output_dir: Path = Path("runs/train")
    """Folder for checkpoints, log and metrics."""
    seed: int = Field(0, ge=0)
    """Seed of initial weights, image order, flips and the sampling of anchors and RoIs."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Training device. auto: a GPU if there is one, else the CPU."""
    precision: Literal["fp32", "tf32", "fp16", "bf16"] = "fp16"
    """Arithmetic: fp32, TF32, or autocast to fp16 (with loss scaling; GPU only) or bf16."""
    channels_last: bool = True
    """Store weights and activations in NHWC order: faster on GPUs, except with group norm."""
    compile: bool = False
    """Compile losses and gradients with torch.compile: faster on a GPU, but the first run takes a
    minute or two for each input size."""
    weights: str | None = None
    """Initial weights of the model or its backbone: a file, an http(s) address, the name of
    torchvision weights, or a name of `maskrcnn weights list`. Formats: this project, torchvision,
    detectron2, maskrcnn-benchmark and Caffe2. None: random weights."""
    checkpoint_period: int = Field(2500, ge=1)
    """Iterations between checkpoints."""
    keep_checkpoints: int | None = Field(3, ge=1)
    """Number of latest periodic checkpoints to keep, besides the final and the best checkpoint.
    None: keep all."""
    log_period: int = Field(20, ge=1)
    """Iterations between log lines."""
    model: ModelConfig = ModelConfig()
    data: DataConfig
    solver: SolverConfig = SolverConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @field_validator("solver")
    @classmethod
    def _scale_solver(cls, solver: SolverConfig) -> SolverConfig:
        return solver.scaled()


def load_config(source: str, overrides: Sequence[str] = ()) -> TrainConfig:
    """Load a training configuration from a preset or a YAML file, with `key.path=value` overrides.

    Raises:
        ConfigError: A key or value is invalid, or `weights` is not set although parts of the
            backbone are frozen.
    """
    config = validated_config(source, overrides)
    backbone = config.model.backbone
    pretrained = backbone.frozen_stages > 0 or backbone.norm == "frozen_bn"
    if pretrained and "weights" not in config.model_fields_set:
        raise ConfigError(
            f"{source}: the backbone has frozen stages or frozen batch norm but no weights; set "
            "weights=FILE, or weights=null for random weights, or train the whole backbone with "
            "model.backbone.frozen_stages=0 and model.backbone.norm=gn"
        )
    return config


def validated_config(
    source: str, overrides: Sequence[str] = (), sections: Values | None = None
) -> TrainConfig:
    """Load and validate a configuration, but do not require initial weights.

    Args:
        source: YAML file or name of a preset.
        overrides: Overrides of the form `key.path=value`.
        sections: Sections (such as `model`) that replace those of the source.

    Raises:
        ConfigError: A key or value is invalid. The message names it and the allowed values.
    """
    try:
        return TrainConfig.model_validate(read_values(source, overrides, sections))
    except (SourceError, OverrideError) as error:
        raise ConfigError(str(error)) from None
    except ValidationError as error:
        raise ConfigError(f"{source}: {validation_message(error, TrainConfig)}") from None


def yaml_from_config(config: TrainConfig) -> str:
    """Return a configuration as YAML text that loads as an equal configuration."""
    values = config.model_dump(mode="json")
    if "num_classes" not in config.model.model_fields_set:
        # If the key is absent, training sets it to the data set's number of categories.
        del values["model"]["num_classes"]
    return yaml.safe_dump(values, sort_keys=False, default_flow_style=None)
