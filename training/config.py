"""Configuration of a training run: schema, loading from YAML and `key.path=value` overrides."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from ..model.bundle.spec import BUCKET_STEP, MAX_PIXELS, ResizeRule, ShapeBucket
from ..model.config.error_messages import validation_message
from ..model.config.overrides import OverrideError, checked_overrides
from ..model.config.schema import ModelConfig, YamlConfig
from .config_sources import SourceError, Values, read_values
from .devices import DeviceField, number_of_processes
from .solver_config import MAX_BATCH, SolverConfig
from .transforms_config import Transform, check_order


class ConfigError(Exception):
    """Invalid configuration: bad key or value, or conflict with data, machine or earlier run."""


class DatasetConfig(YamlConfig):
    """Paths of a data set in COCO format."""

    images: Path
    """Folder with the image files. A relative path is relative to the working directory."""
    annotations: Path
    """COCO instances JSON file. A relative path is relative to the working directory."""


class ExtraDatasetConfig(DatasetConfig):
    """Paths and weight of an additional training set in COCO format."""

    weight: float = Field(1.0, gt=0, le=1000)
    """Average number of times that an epoch uses each image. The weight of `data.train` is 1."""


class DataConfig(YamlConfig):
    """Training and validation sets, and preprocessing of their images."""

    train: DatasetConfig
    """Training set."""
    val: DatasetConfig | None = None
    """Validation set. None: no evaluation."""
    extra_train: tuple[ExtraDatasetConfig, ...] = ()
    """Further training sets, as in [{images: DIR, annotations: FILE, weight: 2}]. An epoch uses
    each of their images `weight` times (default 1). `train` must have all of their categories."""
    repeat_threshold: float | None = Field(None, gt=0, le=1)
    """Repeat-factor sampling (LVIS): an epoch uses an image max(1, sqrt(threshold / frequency))
    times. Here, frequency is the share of all images that have the image's rarest class. None: no
    repetition."""
    min_size: int = Field(800, ge=32)
    """Shorter side of resized images in pixels (smaller if `max_size` limits the longer side)."""
    max_size: int = Field(1333, ge=32)
    """Upper limit of the longer side of resized images in pixels."""
    resize: ResizeRule = "pillow"
    """Rule for rounding and interpolation in resizing: that of Pillow, torchvision or detectron2.
    Checkpoints store the rule. An evaluation uses the checkpoint's rule unless this key is set."""
    exif_orientation: Literal["apply", "ignore"] = "apply"
    """Whether to apply the EXIF rotation of an image, as viewers and the server do. This key has an
    effect only if the annotated size fits both the rotated and the unrotated image. Otherwise, the
    size decides."""
    buckets: tuple[ShapeBucket, ...] = (ShapeBucket(800, 1344), ShapeBucket(1344, 800))
    """Shape buckets: sizes (height, width) to which resized images are padded. All images of a
    batch are padded to the same bucket."""
    flip_probability: float = Field(0.5, ge=0, le=1)
    """Probability that a training image is flipped horizontally."""
    transforms: tuple[Transform, ...] = ()
    """Further augmentation of training images, applied in the order of this list, as in [{name:
    ColorJitter, brightness: 0.4}]. Names: ScaleJitter or RandomShortestSize (must be first),
    RandomCrop, RandomRotation, RandomVerticalFlip, ColorJitter, SimpleCopyPaste (must be last).
    Images larger than their bucket are cropped to it."""
    on_broken: Literal["skip", "refuse"] = "skip"
    """Unreadable images and invalid annotations: skip them with a warning, or refuse them, which
    stops the run."""
    keep_empty: bool = False
    """Also train on images without objects."""
    workers: int = Field(2, ge=0, le=512)
    """Data-loading processes. 0: load in the training process."""
    decode: Literal["workers", "device"] = "workers"
    """Decode, resize and flip JPEG files in the data-loading processes (workers), or on the
    training device (device), which frees CPU cores. With device, the data-loading processes decode
    only files that the device cannot decode."""

    @model_validator(mode="after")
    def _check_sizes(self) -> "DataConfig":
        if self.max_size < self.min_size:
            raise ValueError(f"max_size {self.max_size} is below min_size {self.min_size}")
        for bucket in self.buckets:
            if not bucket.is_multiple_of_step:
                raise ValueError(
                    f"the sides of bucket {bucket} are not multiples of {BUCKET_STEP} pixels"
                )
            if bucket.height * bucket.width > MAX_PIXELS:
                raise ValueError(f"bucket {bucket} has more than {MAX_PIXELS} pixels")
        short, long = (
            math.ceil(side / BUCKET_STEP) * BUCKET_STEP for side in (self.min_size, self.max_size)
        )
        for sides in ((self.min_size, self.max_size), (self.max_size, self.min_size)):
            if not any(b.height >= sides[0] and b.width >= sides[1] for b in self.buckets):
                raise ValueError(
                    f"no bucket holds an image of {sides[0]}x{sides[1]} pixels (height x width), "
                    "although min_size and max_size allow this size; add a larger bucket, as in "
                    f"data.buckets=[[{short},{long}],[{long},{short}]]"
                )
        check_order(self.transforms)
        if self.transforms and self.decode == "device":
            raise ValueError(
                "transforms need decode=workers, because they run in the data-loading processes"
            )
        return self


EvaluatorName = Literal["pycocotools", "faster-coco-eval"]

_METRIC = re.compile("(bbox|segm)/(AP|AP50|AP75|AR1|AR10|AR100|A[PR][sml]|AP/.+)")


class EvaluationConfig(YamlConfig):
    """COCO evaluation of the validation set."""

    period: int = Field(0, ge=0)
    """Iterations between evaluations. 0: evaluate only at the end of training."""
    per_epoch: bool = False
    """Also evaluate after every epoch."""
    min_bbox_ap: float | None = Field(None, ge=0, le=1)
    """Stop early when an evaluation reaches this box AP. If `min_mask_ap` is also set, both APs
    must be reached."""
    min_mask_ap: float | None = Field(None, ge=0, le=1)
    """Stop early when an evaluation reaches this mask AP. If `min_bbox_ap` is also set, both APs
    must be reached."""
    patience: int | None = Field(None, ge=1)
    """Stop early after this number of consecutive evaluations that do not exceed the best mask AP
    so far. None: no such limit."""
    skip_test: bool = False
    """Skip all evaluations during and after training."""
    skip_eval: bool = False
    """Write the detections on the validation set to files, but compute no metrics."""
    expected: dict[str, float] = Field(default_factory=dict)
    """Minimum metrics of the final evaluation, as in {bbox/AP: 0.377}. If a metric is lower by more
    than `tolerance`, the command fails with exit code 1."""
    tolerance: float = Field(0.001, ge=0)
    """Accepted shortfall of a metric from its value in `expected`."""
    images_per_batch: int = Field(8, ge=1, le=MAX_BATCH)
    """Inference batch size per rank."""
    losses: bool = False
    """Also compute the losses on the validation set, which takes a second pass over it."""
    draw_images: int = Field(0, ge=0)
    """Number of validation images on which detections are drawn. A PNG file that shows them is
    written to the folder `validation_images` after each evaluation, and after 10, 30 and 100 % of
    the training. `progress.png` joins the files of these three points. 0: write no files."""
    evaluator: EvaluatorName = "faster-coco-eval"
    """Library that computes the metrics. Both give equal metrics; pycocotools is the reference."""

    @property
    def stops_early(self) -> bool:
        """Whether an evaluation can stop the training early."""
        settings = (self.min_bbox_ap, self.min_mask_ap, self.patience)
        return any(setting is not None for setting in settings)

    @model_validator(mode="after")
    def _check_targets(self) -> "EvaluationConfig":
        if self.stops_early and not (self.per_epoch or self.period or self.skip_test):
            raise ValueError(
                "min_bbox_ap, min_mask_ap and patience need evaluations during training; set "
                "per_epoch=true, or set period to a number of iterations"
            )
        return self

    @model_validator(mode="after")
    def _check_expected(self) -> "EvaluationConfig":
        for name in self.expected:
            if not _METRIC.fullmatch(name):
                raise ValueError(
                    f"the key `expected` has the unknown metric {name!r}; metrics are bbox/M and "
                    "segm/M, where M is AP, AP50, AP75, APs, APm, APl, AR1, AR10, AR100, ARs, ARm, "
                    "ARl or AP/CLASS"
                )
            if self.expected[name] > 1:
                raise ValueError(
                    f"the key `expected` has {name}: {self.expected[name]}; metrics are in 0..1, "
                    "not in percent"
                )
        if self.expected and self.skip_eval:
            raise ValueError(
                "the key `expected` needs metrics, but skip_eval=true computes none; set "
                "skip_eval=false or expected={}"
            )
        return self


class TrainConfig(YamlConfig):
    """Configuration of a training run.

    A YAML file may contain the key `base`: the name of a preset, or the path of a base file,
    relative to the YAML file's folder. The base supplies the keys that the YAML file does not set.
    """

    output_dir: Path = Path("runs/train")
    """Folder for checkpoints, log and metrics."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of initial weights, image order, flips and the sampling of anchors and RoIs."""
    device: DeviceField = "auto"
    """Training device: auto (a GPU if there is one, else the CPU), cpu, cuda, or GPU numbers
    such as 0,1, with one process per GPU."""
    processes: int | None = Field(None, ge=1)
    """Number of training processes on this machine. On GPUs, each process uses its own GPU. None:
    one process per GPU number in `device`, or one process if `device` has no GPU numbers."""
    precision: Literal["fp32", "tf32", "fp16", "bf16"] = "fp16"
    """Arithmetic: fp32, TF32, or autocast to fp16 (with loss scaling; GPU only) or bf16."""
    channels_last: bool = True
    """Store weights and activations in NHWC order: faster on GPUs, except with group norm."""
    compile: Literal["auto", True, False] = "auto"
    """Compile losses and gradients with torch.compile. In the first run, this takes a minute per
    input size. auto: compile on a GPU if the run has 3,000 iterations or more."""
    weights: str | None = None
    """Initial weights of the model or its backbone: a file, an http(s) address, the name of
    torchvision weights, or a name from `maskrcnn weights list`. Formats: this project, torchvision,
    detectron2, maskrcnn-benchmark, NVIDIA and Caffe2. None: random weights."""
    checkpoint_period: int = Field(2500, ge=1)
    """Iterations between checkpoints."""
    keep_checkpoints: int | None = Field(3, ge=1)
    """Number of latest periodic checkpoints to keep, besides the final and the best checkpoint.
    None: keep all."""
    log_period: int = Field(20, ge=1)
    """Iterations between log lines."""
    trackers: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = ("tensorboard",)
    """Trackers of losses and metrics, besides `metrics.jsonl`. MLflow and Weights & Biases must
    be installed, and are set up by their environment variables, such as MLFLOW_TRACKING_URI."""
    model: ModelConfig = ModelConfig()
    data: DataConfig
    solver: SolverConfig = SolverConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @field_validator("solver")
    @classmethod
    def _scale_solver(cls, solver: SolverConfig) -> SolverConfig:
        return solver.scaled()

    @model_validator(mode="after")
    def _check_processes(self) -> "TrainConfig":
        number_of_processes(self.device, self.processes)
        return self


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Load a training configuration from a preset or a YAML file, with `key.path=value` overrides.

    Raises:
        ConfigError: A file is missing, or a key or value is invalid (see `validated_config`). Or
            the key `weights` is not set, although parts of the backbone are frozen.
    """
    config = validated_config(source, overrides)
    backbone = config.model.backbone
    pretrained = backbone.frozen_stages > 0 or backbone.norm == "frozen_bn"
    if pretrained and "weights" not in config.model_fields_set:
        raise ConfigError(
            f"{source}: the key `weights` is missing, but the backbone has frozen stages or frozen "
            "batch norm; set weights=FILE, or train the whole backbone with "
            "model.backbone.frozen_stages=0 and model.backbone.norm=gn; to freeze random weights, "
            "set weights=null"
        )
    return config


def validated_config(
    source: str | Path, overrides: Sequence[str] = (), sections: Values | None = None
) -> TrainConfig:
    """Load and validate a configuration. Unlike `load_config`, do not require the key `weights`.

    Args:
        source: YAML file or name of a preset.
        overrides: Overrides of the form `key.path=value`.
        sections: Values of top-level sections by name, such as `model`. They replace these sections
            of `source` before the overrides are applied.

    Raises:
        ConfigError: `source` is neither a string nor a path. `source`, or a file that a key `base`
            names, is missing or is not a YAML mapping. A key or value is invalid; the message names
            the key and the allowed values. An override sets `solver.max_iterations` although
            `solver.epochs` is set.
    """
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"the configuration is a {type(source).__name__}; give the name of a preset, or the "
            "path of a YAML file"
        )
    try:
        overrides = checked_overrides(overrides)
        config = TrainConfig.model_validate(read_values(str(source), overrides, sections))
    except (SourceError, OverrideError) as error:
        raise ConfigError(str(error)) from None
    except ValidationError as error:
        raise ConfigError(f"{source}: {validation_message(error, TrainConfig)}") from None
    check_length(config, overrides)
    return config


def check_length(config: TrainConfig, overrides: Sequence[str]) -> None:
    """Check that overrides do not set `solver.max_iterations` if `solver.epochs` is set.

    Raises:
        ConfigError: `solver.epochs` is set, and an override sets `solver.max_iterations`.
    """
    ignored = [text for text in overrides if text.startswith("solver.max_iterations=")]
    if config.solver.epochs is not None and ignored:
        raise ConfigError(
            f"{ignored[0]} has no effect, because solver.epochs is {config.solver.epochs}; leave "
            "out this override, or set solver.epochs=null"
        )


def yaml_from_config(config: TrainConfig) -> str:
    """Return a configuration as YAML text. Loading the text gives an equal configuration."""
    values = config.model_dump(mode="json")
    if "num_classes" not in config.model.model_fields_set:
        # If the key is absent, training sets it to the data set's number of categories.
        del values["model"]["num_classes"]
    return yaml.safe_dump(values, sort_keys=False, default_flow_style=None)
