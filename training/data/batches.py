"""A batch of images with its ground truth, padded to one shape."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...model.images import pad_to_bucket
from ...model.spec import ShapeBucket
from ...model.targets import Targets
from .encoded_images import EncodedImage, decode_images


class Sample(NamedTuple):
    """An image as the model will see it, before padding; n is its number of objects."""

    image_id: int
    source_size: tuple[int, int]
    """Height and width of the image as annotated."""
    size: tuple[int, int]
    """Height h and width w of the image as the model will see it."""
    image: NDArray[np.uint8] | EncodedImage
    """[h, w, 3] RGB, or what becomes that on the device."""
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

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory of the batch until a stream has done what is queued on it now."""

        def record(tensor: Tensor) -> Tensor:
            tensor.record_stream(stream)
            return tensor

        self._map(record)

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


@dataclass(frozen=True)
class EncodedBatch:
    """A batch some of whose images are decoded on the device."""

    rest: Batch
    """The batch without pixels: its images are [B, 3, 0, 0]."""
    images: tuple[EncodedImage | Tensor, ...]
    """What the device decodes, and pixels [3, h, w] uint8 of what it can not."""
    bucket: ShapeBucket

    @property
    def image_ids(self) -> Tensor:
        """[B] int64."""
        return self.rest.image_ids

    @property
    def skipped(self) -> tuple[str, ...]:
        """Why images were left out or replaced, one sentence a file."""
        return self.rest.skipped

    def pin_memory(self) -> "EncodedBatch":
        """The batch in page-locked memory, but for the files, which are decoded from any."""
        images = (i if isinstance(i, EncodedImage) else i.pin_memory() for i in self.images)
        return replace(self, rest=self.rest.pin_memory(), images=tuple(images))

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Batch:
        """The batch on a device, which decodes, resizes, mirrors and pads the images.

        Raises:
            DataError: a file is damaged within.
        """
        padded = torch.zeros(len(self.images), 3, *self.bucket, dtype=torch.uint8, device=device)
        encoded = [image for image in self.images if isinstance(image, EncodedImage)]
        decoded = iter(decode_images(encoded, device))
        for own, image in zip(padded, self.images, strict=True):
            pixels = next(decoded) if isinstance(image, EncodedImage) else image.to(device)
            own[:, : pixels.shape[1], : pixels.shape[2]] = pixels
        return replace(self.rest.to(device, non_blocking=non_blocking), images=padded)


def batch_from_samples(
    samples: Sequence[Sample],
    bucket: ShapeBucket,
    *,
    targets: bool,
    mask_crop_size: int | None = None,
    skipped: Sequence[str] = (),
) -> Batch | EncodedBatch:
    """Pad samples into a bucket, now or, if any of them is encoded, on the device.

    Args:
        samples: none larger than the bucket; without any, the batch is empty.
        bucket: the shape of the batch.
        targets: whether the batch gets the ground truth.
        mask_crop_size: side S of the samples' masks where they are crops of the boxes.
        skipped: why images were left out or replaced.
    """
    mask_size = (mask_crop_size, mask_crop_size) if mask_crop_size else bucket
    batch = Batch(
        images=torch.zeros(len(samples), 3, 0, 0, dtype=torch.uint8),
        image_sizes=_integers([s.size for s in samples]).reshape(-1, 2),
        targets=_targets_from(samples, mask_size) if targets else None,
        image_ids=_integers([s.image_id for s in samples]),
        source_sizes=_integers([s.source_size for s in samples]).reshape(-1, 2),
        seeds=_integers([s.seed for s in samples]),
        skipped=tuple(skipped),
    )
    images = [sample.image for sample in samples]
    if any(isinstance(image, EncodedImage) for image in images):
        return EncodedBatch(batch, tuple(map(_chw_tensor_from, images)), bucket)
    padded = np.zeros((len(samples), 3, *bucket), np.uint8)
    for own, image in zip(padded, images, strict=True):
        assert not isinstance(image, EncodedImage)
        own[:] = pad_to_bucket(image, bucket)
    return replace(batch, images=torch.from_numpy(padded))


def _chw_tensor_from(image: NDArray[np.uint8] | EncodedImage) -> Tensor | EncodedImage:
    if isinstance(image, EncodedImage):
        return image
    return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))


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
