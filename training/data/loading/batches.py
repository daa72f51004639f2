"""Batches of images with their ground truth, padded to one input size (shape bucket)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....model.bundle.spec import ShapeBucket
from ....model.resizing import Pixels, pad_to_bucket
from ....model.targets import Targets
from .encoded_images import EncodedImage, decode_images


class Sample(NamedTuple):
    """Resized image with n objects, before padding."""

    image_id: int
    # Height and width of the original image.
    source_size: tuple[int, int]
    # Height h and width w of the resized image.
    size: tuple[int, int]
    # [h, w, 3] RGB, or a JPEG file that the device will decode.
    image: Pixels | EncodedImage
    # [n, 4] xyxy in pixels of the resized image.
    boxes: NDArray[np.float32]
    # [n]; 1 is the first class.
    labels: NDArray[np.int64]
    # [n, h, w], or [n, S, S] if masks are cropped to the boxes; 0 or 1.
    masks: NDArray[np.uint8]
    # Seed of the model's random sampling of anchors and RoIs for this image.
    seed: int


@dataclass(frozen=True)
class Batch:
    """B images padded to one shape bucket (H, W), with their ground truth."""

    # [B, 3, H, W] RGB, zero-padded at the right and the bottom: float32 with the resize rule
    # `torchvision`, else uint8.
    images: Tensor
    # [B, 2] int64: height and width of the resized images before padding.
    image_sizes: Tensor
    # Ground truth in pixels of the resized images. None in evaluation.
    targets: Targets | None
    # [B] int64.
    image_ids: Tensor
    # [B, 2] int64: height and width of the original images.
    source_sizes: Tensor
    # [B] int64: seeds of the model's random sampling.
    seeds: Tensor
    # One error message for each file that could not be read.
    skipped: tuple[str, ...] = field(default=(), kw_only=True)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Batch":
        """Return a copy of the batch with all tensors on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Return a copy of the batch in page-locked memory, for asynchronous copies to a GPU."""
        return self._map(Tensor.pin_memory)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the batch's GPU memory allocated until the work queued on a CUDA stream is done."""

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
    """Batch with JPEG files that are not decoded yet. The method `to` decodes them on a device."""

    # The batch without pixels: `rest.images` is [B, 3, 0, 0].
    rest: Batch
    # JPEG file of each image, or its pixels [3, h, w] if the device cannot decode it.
    images: tuple[EncodedImage | Tensor, ...]
    bucket: ShapeBucket

    @property
    def image_ids(self) -> Tensor:
        """Ids of the images, [B] int64."""
        return self.rest.image_ids

    @property
    def skipped(self) -> tuple[str, ...]:
        """One error message for each file that could not be read."""
        return self.rest.skipped

    def pin_memory(self) -> "EncodedBatch":
        """Return a copy of the batch in page-locked memory. JPEG files are not copied."""
        # JPEG files stay as they are, because the decoder reads them from pageable memory.
        images = (i if isinstance(i, EncodedImage) else i.pin_memory() for i in self.images)
        return replace(self, rest=self.rest.pin_memory(), images=tuple(images))

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Batch:
        """Return a `Batch` with all tensors on a device.

        The device decodes, resizes, flips and pads the images.

        Raises:
            DataError: A JPEG file is damaged.
        """
        encoded = [image for image in self.images if isinstance(image, EncodedImage)]
        decoded = decode_images(encoded, device)
        padded = decoded[0].new_zeros(len(self.images), 3, *self.bucket)
        following = iter(decoded)
        for target, image in zip(padded, self.images, strict=True):
            pixels = next(following) if isinstance(image, EncodedImage) else image.to(device)
            target[:, : pixels.shape[1], : pixels.shape[2]] = pixels
        return replace(self.rest.to(device, non_blocking=non_blocking), images=padded)


def batch_from_samples(
    samples: Sequence[Sample],
    bucket: ShapeBucket,
    *,
    targets: bool,
    mask_crop_size: int | None,
    skipped: Sequence[str],
) -> Batch | EncodedBatch:
    """Pad samples to a shape bucket (input size) and stack them.

    Args:
        samples: Samples no larger than the bucket. An empty sequence gives an empty batch.
        bucket: Height and width of the batch.
        targets: Include the ground truth in the batch.
        mask_crop_size: Side S of the masks if they are cropped to their boxes. None: the masks have
            the size of the bucket.
        skipped: One error message for each file that could not be read.

    Returns:
        A `Batch`, or an `EncodedBatch` if any image is an `EncodedImage`.
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
    pixels = [image for image in images if not isinstance(image, EncodedImage)]
    if len(pixels) < len(images):
        return EncodedBatch(batch, tuple(map(_chw_tensor_from, images)), bucket)
    padded = np.zeros((len(samples), 3, *bucket), pixels[0].dtype if pixels else np.uint8)
    for target, image in zip(padded, pixels, strict=True):
        target[:] = pad_to_bucket(image, bucket)
    return replace(batch, images=torch.from_numpy(padded))


def _chw_tensor_from(image: Pixels | EncodedImage) -> Tensor | EncodedImage:
    if isinstance(image, EncodedImage):
        return image
    return torch.from_numpy(np.array(image.transpose(2, 0, 1), order="C"))


def _integers(values: Sequence[int] | Sequence[tuple[int, ...]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _targets_from(samples: Sequence[Sample], mask_size: tuple[int, int]) -> Targets:
    # Reserve space for at least one object, because the model does not support empty tensors.
    rows = max([1, *(len(sample.labels) for sample in samples)])
    boxes = np.zeros((len(samples), rows, 4), np.float32)
    labels = np.zeros((len(samples), rows), np.int64)
    masks = np.zeros((len(samples), rows, *mask_size), np.uint8)
    for number, sample in enumerate(samples):
        n, height, width = sample.masks.shape
        boxes[number, :n] = sample.boxes
        labels[number, :n] = sample.labels
        masks[number, :n, :height, :width] = sample.masks
    return Targets(*map(torch.from_numpy, (boxes, labels, masks)))
