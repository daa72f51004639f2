"""Configuration of optimiser and learning-rate schedule: section `solver`."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..model.config.schema import YamlConfig

# Maximum number of images in a batch, far above all sensible values.
MAX_BATCH = 65536


class SolverConfig(YamlConfig):
    """Optimiser, length of the run, and learning-rate schedule."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    """SGD with momentum, as in detectron2, or AdamW, which converges faster from random weights."""
    images_per_batch: int = Field(16, ge=1, le=MAX_BATCH)
    """Images per optimiser step: total over all ranks and accumulated passes."""
    accumulate: int = Field(1, ge=1, le=MAX_BATCH)
    """Forward and backward passes per optimiser step. More passes need less memory."""
    scale_from_batch: int | None = Field(None, ge=1, le=MAX_BATCH)
    """Number of images per step for which `base_lr`, `max_iterations`, `steps` and
    `warmup_iterations` are meant. On loading, these four keys are scaled linearly to
    `images_per_batch` (Goyal et al., 2017), and this key is set to None. None: no scaling."""
    base_lr: float = Field(0.02, gt=0)
    """Learning rate after warm-up."""
    bias_lr_factor: float = Field(1.0, gt=0)
    """Factor by which the learning rate of biases is multiplied."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of SGD, or the first beta of AdamW."""
    weight_decay: float = Field(1e-4, ge=0)
    """Weight decay of layer weights. Biases and normalisation parameters have none."""
    max_iterations: int = Field(90000, ge=1, le=1_000_000_000)
    """Number of optimiser steps of the run."""
    epochs: int | None = Field(None, ge=1, le=1_000_000)
    """Length of the run in epochs, instead of `max_iterations`. If set, `steps` are scaled to this
    length, and the warm-up is limited to a tenth of the run. None: use `max_iterations`."""
    schedule: Literal["steps", "cosine", "linear"] = "steps"
    """Decay of the learning rate. steps: it is multiplied by `gamma` at each of `steps`. cosine,
    linear: it falls to 0 at the end of the run, along half a cosine or linearly."""
    steps: tuple[Annotated[int, Field(ge=1)], ...] = (60000, 80000)
    """Iterations at which the learning rate is multiplied by `gamma`, with schedule `steps`."""
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
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Decay of an exponential moving average of the weights, such as 0.999. Evaluation and export
    use the average. In step t the decay is at most (1 + t) / (10 + t). None: no average."""

    @model_validator(mode="after")
    def _check_batch(self) -> "SolverConfig":
        if self.images_per_batch % self.accumulate:
            raise ValueError(
                f"images_per_batch {self.images_per_batch} is not divisible by accumulate "
                f"{self.accumulate}; change one of the two"
            )
        if list(self.steps) != sorted(set(self.steps)):
            raise ValueError(f"steps {list(self.steps)} are not in strictly ascending order")
        return self

    def scaled(self) -> "SolverConfig":
        """Scale the schedule from the batch size `scale_from_batch` to `images_per_batch`.

        `base_lr` is multiplied by the ratio `images_per_batch / scale_from_batch`.
        `max_iterations`, `steps` and `warmup_iterations` are divided by this ratio. If
        `scale_from_batch` is None, the configuration is returned unchanged.

        Raises:
            ValueError: Two of `steps` are equal after rounding, or one is 0.
        """
        if self.scale_from_batch is None:
            return self
        ratio = self.images_per_batch / self.scale_from_batch
        steps = tuple(round(step / ratio) for step in self.steps)
        if len({0, *steps}) <= len(steps):
            raise ValueError(
                f"steps {list(self.steps)} become {list(steps)} when scaled from "
                f"{self.scale_from_batch} to {self.images_per_batch} images_per_batch, but steps "
                "must be distinct and above 0; set scale_from_batch=null and a schedule for this "
                "batch size"
            )
        scaled = {
            "scale_from_batch": None,
            "base_lr": self.base_lr * ratio,
            "max_iterations": max(1, round(self.max_iterations / ratio)),
            "steps": steps,
            "warmup_iterations": round(self.warmup_iterations / ratio),
        }
        return self.model_copy(update=scaled)

    def with_epoch_length(self, iterations_per_epoch: int) -> "SolverConfig":
        """Return the configuration with `epochs` converted to `max_iterations`.

        This also adapts `steps` and the warm-up, as `with_length` does. If `epochs` is None, the
        configuration is returned unchanged.

        Args:
            iterations_per_epoch: Number of iterations in one epoch.
        """
        if self.epochs is None:
            return self
        return self.with_length(self.epochs * iterations_per_epoch)

    def with_length(self, iterations: int) -> "SolverConfig":
        """Return the configuration with `max_iterations` set to `iterations`, and without `epochs`.

        `steps` are scaled to the new length of the run, and the warm-up is limited to a tenth of
        this length.
        """
        ratio = iterations / self.max_iterations
        changes = {
            "epochs": None,
            "max_iterations": iterations,
            # Use a set, because in a short run several steps may fall on the same iteration.
            "steps": tuple(sorted({round(step * ratio) for step in self.steps} - {0})),
            "warmup_iterations": min(self.warmup_iterations, iterations // 10),
        }
        return self.model_copy(update=changes)
