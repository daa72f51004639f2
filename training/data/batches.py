"""A batch of images with its ground truth, padded to one shape."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...model.images import pad_to_bucket
from ...model.spec import ShapeBucket
from ...model.targets import Targets


class Sample(NamedTuple):
    """An image as the model will see it, before padding; n is its number of objects."""

    image_id: int
    source_size: tuple[int, int]
    """Height and width of the image as annotated."""
    image: NDArray[np.uint8]
    """[h, w, 3] RGB."""
    boxes: NDArray[np.float32]
    """[n, 4] xyxy in input pixels."""
    labels: NDArray[np.int64]
    """[n]; 1 is the first class."""
    masks: NDArray[np.uint8]
    """[n, h, w] or, as crops of the boxes, [n, S, S]: 0 or 1."""
    seed: int
    """Fixes what the model draws at random for this image."""


@dataclass(frozen=True)
class Batch:
    """Images of one shape bucket."""

    images: Tensor
    """[B, 3, H, W] uint8 RGB, padded with zeros at the right and the bottom."""
    image_sizes: Tensor
    """[B, 2] int64: height and width before padding."""
    targets: Targets | None
    """Ground truth in input pixels; none in evaluation."""
    image_ids: Tensor
    """[B] int64."""
    source_sizes: Tensor
    """[B, 2] int64: height and width of the images as annotated."""
    seeds: Tensor
    """[B] int64: fix what the model draws at random for each image."""
    skipped: tuple[str, ...] = field(default=(), kw_only=True)
    """Why images were left out or replaced, one sentence a file."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """The batch with all tensors on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """The batch in page-locked memory, which a GPU can fetch while it computes."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        targets = self.targets
        return Batch(
            images=function(self.images),
            image_sizes=function(self.image_sizes),
            targets=None if targets is None else Targets(*map(function, targets)),
            image_ids=function(self.image_ids),
            source_sizes=function(self.source_sizes),
            seeds=function(self.seeds),
            skipped=self.skipped,
        )


def batch_from_samples(
    samples: Sequence[Sample],
    bucket: ShapeBucket,
    *,
    targets: bool,
    mask_crop_size: int | None = None,
    skipped: Sequence[str] = (),
) -> Batch:
    """Pad samples into a bucket.

    Args:
        samples: none larger than the bucket; without any, the batch is empty.
        bucket: the shape of the batch.
        targets: whether the batch gets the ground truth.
        mask_crop_size: side S of the samples' masks where they are crops of the boxes.
        skipped: why images were left out or replaced.
    """
    mask_size = (mask_crop_size, mask_crop_size) if mask_crop_size else bucket
    images = np.zeros((len(samples), 3, *bucket), np.uint8)
    for padded, sample in zip(images, samples, strict=True):
        padded[:] = pad_to_bucket(sample.image, bucket)
    return Batch(
        images=torch.from_numpy(images),
        image_sizes=_integers([s.image.shape[:2] for s in samples]).reshape(-1, 2),
        targets=_targets_from(samples, mask_size) if targets else None,
        image_ids=_integers([s.image_id for s in samples]),
        source_sizes=_integers([s.source_size for s in samples]).reshape(-1, 2),
        seeds=_integers([s.seed for s in samples]),
        skipped=tuple(skipped),
    )


def _integers(values: Sequence[int] | Sequence[tuple[int, ...]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _targets_from(samples: Sequence[Sample], mask_size: tuple[int, int]) -> Targets:
    # A graph of fixed shapes wants at least one row, be it padding.
    rows = max(1, *(len(sample.labels) for sample in samples))
    boxes = np.zeros((len(samples), rows, 4), np.float32)
    labels = np.zeros((len(samples), rows), np.int64)
    masks = np.zeros((len(samples), rows, *mask_size), np.uint8)
    for number, sample in enumerate(samples):
        n, height, width = sample.masks.shape
        boxes[number, :n] = sample.boxes
        labels[number, :n] = sample.labels
        masks[number, :n, :height, :width] = sample.masks
    return Targets(*map(torch.from_numpy, (boxes, labels, masks)))
