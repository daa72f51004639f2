"""Fit the configuration of a fine-tuning to the data, the initial weights and the machine."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter

from ...model.bundle.spec import ShapeBucket
from ...model.checkpoint import Checkpoint
from ...model.plurals import counted
from ..data.coco.dataset import ImageRecord
from ..run_length import finetuning_epochs
from .machine import Machine

# Input sizes are multiples of this number of pixels.
_STRIDE = 32
# Memory in bytes: fixed (weights, optimiser and libraries), and per input pixel of a batch.
# Measured with torchvision's maskrcnn_resnet50_fpn_v2: on a GPU in 16-bit arithmetic, and on a CPU
# in fp32 with `_CPU_ROIS`.
_FIXED_MEMORY = {"cuda": 2.0e9, "cpu": 1.5e9}
_PIXEL_MEMORY = {"cuda": 3.0e3, "cpu": 9.0e3}
# Share of the free memory that is used.
_MEMORY_SHARE = 0.8
_MAX_BATCH = 16
# Limits on a CPU: shorter side in pixels, images per step, and RoIs and proposals per image.
_CPU_SIZE, _CPU_BATCH, _CPU_ROIS, _CPU_PROPOSALS = 320, 2, 64, 300
# On a CPU, the forward passes of the run have at most this number of multiplications: those of 260
# images of 320x320 pixels with torchvision's maskrcnn_resnet50_fpn_v2. With the backward passes,
# they take about 20 minutes at 50 GFLOPS, the estimated rate of two cores.
_CPU_MULTIPLICATIONS = 1e13
# Multiplications of a ResNet per input pixel and parameter.
_RESNET_USES = 3.4e-3
# RPN positions per input pixel: 1/16 on the finest level, and 1/3 of that on the other levels
# together.
_RPN_POSITIONS = 4 / 3 / 16
# Multiplier of the number of epochs if training starts from random weights.
_RANDOM_LENGTH = 6
# Images are enlarged by at most this factor.
_MAX_ENLARGEMENT = 2.0
# Learning rate of AdamW for `_RATE_BATCH` images per step. It grows with the square root of the
# batch size.
_RATE, _RATE_BATCH = 3e-4, 4


class FittedSettings(NamedTuple):
    """Values of a training configuration, and the reasons for them."""

    # Nested values of `TrainConfig`, without `data.train` and `data.val`.
    values: dict[str, Any]
    # Reason by dotted key.
    reasons: dict[str, str]


@dataclass(frozen=True, slots=True)
class ImageStatistics:
    """Number and sizes of the training images."""

    count: int
    # Median of the shorter side in pixels.
    shorter_side: int
    # 95 % quantile of the ratio of the longer side to the shorter side.
    aspect: float

    @classmethod
    def of(cls, records: Sequence[ImageRecord]) -> "ImageStatistics":
        """Compute the number of images, and quantiles of their sizes and aspect ratios."""
        sides = np.array([sorted((r.height, r.width)) for r in records])
        return cls(
            count=len(records),
            shorter_side=int(np.median(sides[:, 0])),
            aspect=float(np.quantile(sides[:, 1] / sides[:, 0], 0.95)),
        )


def plan_finetuning(
    images: ImageStatistics,
    start: Checkpoint,
    machine: Machine,
    given: Mapping[str, Any],
    *,
    is_pretrained: bool = True,
) -> FittedSettings:
    """Return configuration values that suit images, model and machine, each with its reason.

    Args:
        images: Statistics of the training images.
        start: Architecture and preprocessing of the model to train.
        machine: Properties of the machine.
        given: Values that the user has set, by dotted key. Other values are chosen to suit them.
        is_pretrained: Whether training starts from the weights of `start`. False: training starts
            from random weights.
    """
    data, reasons = _input_size(images, start, machine, given)
    pixels = _padded_pixels(data)
    accumulate = int(given.get("solver.accumulate", 1))
    batch, reasons["solver.images_per_batch"] = _batch(images, pixels, machine, accumulate)
    batch = int(given.get("solver.images_per_batch", batch))
    length = 1 if is_pretrained else _RANDOM_LENGTH
    seen, reasons["solver.max_iterations"] = _images_to_see(images, start, machine, pixels, length)
    if (epochs := given.get("solver.epochs")) is not None:
        seen, reasons["solver.max_iterations"] = (
            int(epochs) * images.count,
            counted(epochs, "epoch"),
        )
    iterations = int(given.get("solver.max_iterations", math.ceil(seen / batch)))
    reasons["solver.base_lr"] = f"AdamW, {counted(batch, 'image')} per step"
    on_gpu = machine.device == "cuda"
    if not on_gpu:
        reasons["model.rpn.post_nms_top_n_test"] = "no GPU"
    cores = max(1, machine.cores // machine.processes - 1)
    values = {
        "precision": "fp32" if not on_gpu else "bf16" if machine.has_bf16 else "fp16",
        "checkpoint_period": max(1, iterations // 4),
        "keep_checkpoints": 1,
        "log_period": max(1, min(20, iterations // 20)),
        "model": _model_values(start, machine),
        "data": {**data, "workers": min(cores, 8 if on_gpu else 1)},
        "solver": {
            "optimizer": "adamw",
            "images_per_batch": batch,
            "base_lr": float(f"{_RATE * math.sqrt(batch / _RATE_BATCH):.2g}"),
            "weight_decay": 0.05,
            "max_iterations": iterations,
            "steps": sorted({round(0.7 * iterations), round(0.9 * iterations)} - {0, iterations}),
            "warmup_iterations": min(500, iterations // 10),
            # Clip gradients, because the first gradients of newly initialised predictors are large.
            "clip_gradient_norm": 1.0,
        },
        "evaluation": {
            "period": max(100, iterations // 4) if on_gpu else 0,
            "images_per_batch": 8 if on_gpu else _CPU_BATCH,
        },
    }
    return FittedSettings(values, reasons)


def _input_size(
    images: ImageStatistics, start: Checkpoint, machine: Machine, given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Fit the input size to the images, the initial weights, the memory and the given values.

    Return values of `min_size`, `max_size` and `buckets` for the section `data`, and the reasons by
    dotted key, such as `data.min_size`.
    """
    trained = start.preprocessing
    limits = [
        (trained.min_size, "as for the initial weights"),
        (
            int(_MAX_ENLARGEMENT * images.shorter_side),
            f"images have a median shorter side of {images.shorter_side}",
        ),
    ]
    if machine.device == "cpu":
        limits.append((_CPU_SIZE, "no GPU"))
    aspect = min(images.aspect, trained.max_size / trained.min_size)
    affordable = (_usable_memory(machine) / _PIXEL_MEMORY[machine.device] / aspect) ** 0.5
    limits.append((int(affordable), "limited by memory for one image per step"))
    if max_size := int(given.get("data.max_size", 0)):
        limits.append((max_size, "limited by data.max_size"))
    if buckets := _given_buckets(given):
        fitting = _other_side(buckets, max_size) if max_size else max(map(min, buckets))
        limits.append((fitting, "limited by data.buckets"))
    size, reason = min(limits, key=itemgetter(0))
    size = int(given.get("data.min_size", max(_STRIDE, _ceil(size - _STRIDE + 1))))
    longer = max(size, math.ceil(size * aspect - 1e-6))
    longer_reason = "95 % of the images fit, the others are reduced"
    if buckets and longer > (fitting := max(size, _other_side(buckets, size))):
        longer, longer_reason = fitting, "limited by data.buckets"
    longer = max_size or longer
    sides = (_ceil(size), _ceil(longer))
    buckets = buckets or tuple(dict.fromkeys([ShapeBucket(*sides), ShapeBucket(*sides[::-1])]))
    reasons = {"data.min_size": reason, "data.max_size": longer_reason}
    return {"min_size": size, "max_size": longer, "buckets": buckets}, reasons


def _given_buckets(given: Mapping[str, Any]) -> tuple[ShapeBucket, ...]:
    """Return the valid shape buckets that the user has set. Empty: no valid bucket is set."""
    buckets = TypeAdapter(tuple[ShapeBucket, ...]).validate_python(given.get("data.buckets", ()))
    return tuple(bucket for bucket in buckets if bucket.is_multiple_of_step)


def _other_side(buckets: Sequence[ShapeBucket], side: int) -> int:
    """Return the largest n such that images of n x `side` and `side` x n pixels fit into buckets.

    If no n fits, the result is 0.
    """
    widths = (bucket.width for bucket in buckets if bucket.height >= side)
    heights = (bucket.height for bucket in buckets if bucket.width >= side)
    return min(max(widths, default=0), max(heights, default=0))


def _ceil(side: float) -> int:
    return max(1, math.ceil(side / _STRIDE)) * _STRIDE


def _padded_pixels(data: Mapping[str, Any]) -> int:
    return max(int(height) * int(width) for height, width in data["buckets"])


def _usable_memory(machine: Machine) -> float:
    """Return the bytes of GPU or host memory that a batch may use.

    The result is at least the memory for one image of 128x128 pixels.
    """
    free = _MEMORY_SHARE * machine.memory - _FIXED_MEMORY[machine.device]
    return max(free, _PIXEL_MEMORY[machine.device] * (4 * _STRIDE) ** 2)


def _batch(
    images: ImageStatistics, pixels: int, machine: Machine, accumulate: int
) -> tuple[int, str]:
    """Return the number of images per step over all processes, and the reason.

    `pixels` is the number of pixels of a padded image. `accumulate` is the number of forward
    and backward passes per step. The number of images is divisible by the number of processes times
    `accumulate`.
    """
    fitting = int(_usable_memory(machine) / _PIXEL_MEMORY[machine.device] / pixels)
    # Limit the batch, because a small data set needs many steps rather than large batches.
    enough = max(2, images.count // 10)
    limit = _CPU_BATCH if machine.device == "cpu" else _MAX_BATCH
    parts = machine.processes * accumulate
    share = max(1, min(fitting, enough // parts, limit // accumulate))
    batch = 2 ** (share.bit_length() - 1) * parts
    if fitting * accumulate < min(enough, limit):
        return batch, f"{machine.memory / 1e9:.0f} GB of free memory"
    if machine.device == "cpu":
        return batch, "no GPU"
    return batch, f"{images.count} training images" if enough < limit else "enough memory"


def _images_to_see(
    images: ImageStatistics, start: Checkpoint, machine: Machine, pixels: int, length: int
) -> tuple[int, str]:
    """Return the number of images to train on (images times epochs), and the reason.

    The number of epochs is `length` times the result of `finetuning_epochs`, or lower on a CPU.
    `length` is 1 for pretrained weights, and larger for random weights. `pixels` is the number of
    pixels of a padded image.
    """
    epochs = length * finetuning_epochs(images.count)
    seen = math.ceil(epochs * images.count)
    reason = f"{epochs:.3g} epochs of {counted(images.count, 'image')}"
    if machine.device == "cpu":
        limit = max(8, int(_CPU_MULTIPLICATIONS / _forward_multiplications(start, pixels)))
        if seen > limit:
            seen, reason = limit, f"no GPU: {limit / images.count:.3g} epochs; more would be better"
    return seen, reason


def _forward_multiplications(start: Checkpoint, pixels: int) -> float:
    """Estimate the multiplications in the forward pass of a training image of `pixels` pixels."""

    def parameters(prefix: str, dimensions: tuple[int, ...] = (2, 4)) -> int:
        return sum(
            tensor.numel()
            for name, tensor in start.weights.items()
            if name.startswith(prefix) and tensor.dim() in dimensions
        )

    roi = start.model_config.roi
    rois = min(_CPU_ROIS, roi.sampling.batch_size_per_image)
    pyramid = parameters("backbone.fpn.layer_blocks.0") + parameters("rpn.head")
    box_head = parameters("roi_heads.box_head", (2,))
    box_head += roi.box_pool**2 * parameters("roi_heads.box_head", (4,))
    mask_head = roi.mask_pool**2 * parameters("roi_heads.mask_head")
    return (
        pixels * (_RESNET_USES * parameters("backbone.body") + _RPN_POSITIONS * pyramid)
        + rois * box_head
        + rois * roi.sampling.positive_fraction * mask_head
    )


def _model_values(start: Checkpoint, machine: Machine) -> dict[str, Any]:
    values: dict[str, Any] = start.model_config.model_dump(mode="json")
    # Remove this key, because training sets it to the data set's number of categories.
    del values["num_classes"]
    if values["backbone"]["norm"] == "bn":
        # Freeze batch norm, because the statistics of small batches would be too noisy.
        values["backbone"]["norm"] = "frozen_bn"
    proposals = _CPU_PROPOSALS if machine.device == "cpu" else 1000
    rpn, sampling = values["rpn"], values["roi"]["sampling"]
    rpn["post_nms_top_n_train"] = min(rpn["post_nms_top_n_train"], proposals)
    if machine.device == "cpu":
        rpn["post_nms_top_n_test"] = min(rpn["post_nms_top_n_test"], proposals)
        sampling["batch_size_per_image"] = min(sampling["batch_size_per_image"], _CPU_ROIS)
    return values
