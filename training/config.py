"""Configuration of a training run: YAML presets, validated, with dotted overrides."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from ..model.config import FrozenConfig, ModelConfig
from ..model.config_faults import sentence_from_fault
from ..model.overrides import OverrideError
from ..model.spec import ShapeBucket
from .config_sources import SourceError, Values, read_values


class ConfigError(Exception):
    """A configuration says something that is not allowed."""


class DatasetConfig(FrozenConfig):
    """A data set in COCO format."""

    images: Path
    """Folder of the images."""
    annotations: Path
    """COCO instances JSON file."""


class DataConfig(FrozenConfig):
    """What is read and how it becomes model input."""

    train: DatasetConfig
    """Data set that is trained on."""
    val: DatasetConfig | None = None
    """Data set that evaluations use; none, no evaluation."""
    min_size: int = Field(800, ge=32)
    """Shorter side in pixels after resizing."""
    max_size: int = Field(1333, ge=32)
    """Longer side in pixels at most after resizing."""
    buckets: tuple[ShapeBucket, ...] = (ShapeBucket(800, 1344), ShapeBucket(1344, 800))
    """Input sizes into which resized images are padded: a batch holds images of one bucket."""
    flip_probability: float = Field(0.5, ge=0, le=1)
    """Chance of a horizontal flip in training."""
    on_broken: Literal["skip", "refuse"] = "skip"
    """Unreadable images and annotations: leave out, named and counted, or stop."""
    keep_empty: bool = False
    """Train on images without annotations too."""
    workers: int = Field(2, ge=0)
    """Processes that read images; 0 reads in the training process."""
    decode: Literal["workers", "device"] = "workers"
    """Who decodes, resizes and flips JPEG files: these processes, or the device that trains, which
    on a GPU leaves them little to do. What it cannot decode is left to them."""

    @model_validator(mode="after")
    def _check_sizes(self) -> "DataConfig":
        if self.max_size < self.min_size:
            raise ValueError(f"max_size {self.max_size} is below min_size {self.min_size}")
        for bucket in self.buckets:
            if bucket.height % 32 or bucket.width % 32:
                raise ValueError(f"bucket {bucket} is not a multiple of 32 on both sides")
        for sides in ((self.min_size, self.max_size), (self.max_size, self.min_size)):
            if not any(b.height >= sides[0] and b.width >= sides[1] for b in self.buckets):
                raise ValueError(f"no bucket holds an image of {sides[0]}x{sides[1]} pixels")
        return self


class SolverConfig(FrozenConfig):
    """Optimiser, with warm-up and steps."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    """SGD with momentum, the reference recipe; AdamW learns faster from scratch."""
    images_per_batch: int = Field(16, ge=1)
    """Images a step, over all ranks and accumulated batches."""
    accumulate: int = Field(1, ge=1)
    """Forward and backward passes a step; more save memory."""
    scale_from_batch: int | None = Field(None, ge=1)
    """Images a step that `base_lr`, `max_iterations`, `steps` and `warmup_iterations` are meant
    for: they are scaled linearly to `images_per_batch` (Goyal et al., 2017). None, as they are,
    which is also what a configuration holds once it is scaled."""
    base_lr: float = Field(0.02, gt=0)
    """Learning rate after warm-up."""
    bias_lr_factor: float = Field(1.0, gt=0)
    """Biases learn at so many times the learning rate."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Of SGD; AdamW's first beta."""
    weight_decay: float = Field(1e-4, ge=0)
    """Of the weights of layers; biases and normalisations do not decay."""
    max_iterations: int = Field(90000, ge=1)
    """Optimiser steps."""
    steps: tuple[int, ...] = (60000, 80000)
    """Iterations at which the learning rate is multiplied by `gamma`."""
    gamma: float = Field(0.1, gt=0, le=1)
    """What the learning rate is multiplied by at each of `steps`."""
    warmup_iterations: int = Field(500, ge=0)
    """Steps until the learning rate is `base_lr`."""
    warmup_factor: float = Field(1 / 3, ge=0, le=1)
    """The learning rate starts at this share of `base_lr`."""
    warmup_method: Literal["linear", "constant"] = "linear"
    """How it gets from there to `base_lr`: rising, or at once when the warm-up is over."""
    freeze_backbone_after_epoch: int | None = Field(None, ge=0)
    """Epochs after which the residual network is no longer trained; none, it always is."""
    clip_gradient_norm: float | None = Field(None, gt=0)
    """Largest norm of the whole gradient; none, no clipping."""

    @model_validator(mode="after")
    def _check_batch(self) -> "SolverConfig":
        if self.images_per_batch % self.accumulate:
            raise ValueError(
                f"images_per_batch {self.images_per_batch} does not divide by accumulate "
                f"{self.accumulate}"
            )
        if list(self.steps) != sorted(set(self.steps)):
            raise ValueError(f"steps {list(self.steps)} must rise")
        return self

    def scaled(self) -> "SolverConfig":
        """The solver for `images_per_batch`, if it is written for `scale_from_batch`.

        The learning rate grows with the batch and iterations shrink, rounded to the nearest and
        `max_iterations` to no less than one, so that the images seen stay the same.

        Raises:
            ValueError: rounding would make two of `steps` one.
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
    """Iterations between evaluations; 0, only at the end."""
    per_epoch: bool = False
    """Evaluate after every epoch."""
    min_bbox_ap: float | None = Field(None, ge=0, le=1)
    """Training stops early when an evaluation reaches this box AP, and `min_mask_ap` if set."""
    min_mask_ap: float | None = Field(None, ge=0, le=1)
    """Training stops early when an evaluation reaches this mask AP, and `min_bbox_ap` if set."""
    skip_test: bool = False
    """Training makes no evaluation at all."""
    skip_eval: bool = False
    """Detect and write the detections, but measure nothing."""
    expected: dict[str, float] = Field(default_factory=dict)
    """Metrics that the last evaluation must reach, as in {bbox/AP: 0.377}; else the run fails."""
    tolerance: float = Field(0.001, ge=0)
    """How far a metric may lie below what is expected."""
    images_per_batch: int = Field(8, ge=1)
    """Images a batch and rank in inference."""
    evaluator: EvaluatorName = "pycocotools"
    """What computes the metrics: COCO's own tools, or others, faster, that find the same."""

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
                    f"expected names {name!r}; allowed are bbox/ or segm/ before AP, AP50, AP75, "
                    "APs, APm, APl, AR1, AR10, AR100, ARs, ARm, ARl or AP/CLASS"
                )
        if self.expected and self.skip_eval:
            raise ValueError(
                "expected needs a measurement; leave out skip_eval, or set expected={}"
            )
        return self


class TrainConfig(FrozenConfig):
    """A training run.

    In a file, the key `base` names a preset, or another file relative to it, whose keys hold where
    it has none of its own.
    """

    output_dir: Path = Path("runs/train")
    """Folder of checkpoints, log and metrics."""
    seed: int = Field(0, ge=0)
    """Fixes initial weights, order of images, flips and sampling."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes the GPU if there is one."""
    precision: Literal["fp32", "tf32", "fp16", "bf16"] = "fp16"
    """Arithmetic: fp16 scales the loss; fp16 needs a GPU."""
    channels_last: bool = True
    """Keep features in NHWC memory order, which is faster on GPUs, but slower with group norm."""
    weights: str | None = None
    """What training starts from: a file, an http(s) address or torchvision's name of weights of
    this project, torchvision, detectron2, maskrcnn-benchmark or Caffe2, whole or backbone alone."""
    checkpoint_period: int = Field(2500, ge=1)
    """Iterations between checkpoints."""
    keep_checkpoints: int | None = Field(3, ge=1)
    """Numbered checkpoints that are kept, the latest ones, beside the final one and the best; none,
    all of them."""
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
    """Configuration from a YAML file or the name of a preset, with `key.path=value` overrides.

    Raises:
        ConfigError: in one sentence, the key or value at fault and what is allowed.
    """
    config = validated_config(source, overrides)
    backbone = config.model.backbone
    pretrained = backbone.frozen_stages > 0 or backbone.norm == "frozen_bn"
    if pretrained and "weights" not in config.model_fields_set:
        raise ConfigError(
            f"{source}: the backbone has frozen stages or statistics but no weights; set "
            "weights=FILE, or weights=null to leave them random, or train them too with "
            "model.backbone.frozen_stages=0 and model.backbone.norm=gn"
        )
    return config


def validated_config(
    source: str, overrides: Sequence[str] = (), sections: Values | None = None
) -> TrainConfig:
    """Configuration that need not be one to train with: its weights may be missing.

    Args:
        source: YAML file or name of a preset.
        overrides: of the form `key.path=value`.
        sections: values that take the place of whole sections of the source.

    Raises:
        ConfigError: in one sentence, the key or value at fault and what is allowed.
    """
    try:
        return TrainConfig.model_validate(read_values(source, overrides, sections))
    except (SourceError, OverrideError) as error:
        raise ConfigError(str(error)) from None
    except ValidationError as error:
        raise ConfigError(f"{source}: {sentence_from_fault(error, TrainConfig)}") from None


def yaml_from_config(config: TrainConfig) -> str:
    """The whole configuration as YAML that loads to the same again."""
    values = config.model_dump(mode="json")
    if "num_classes" not in config.model.model_fields_set:
        del values["model"]["num_classes"]  # left out, it is that of the data
    return yaml.safe_dump(values, sort_keys=False, default_flow_style=None)
