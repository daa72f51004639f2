"""Augment training samples with the torchvision transforms that `data.transforms` lists."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchvision import tv_tensors
from torchvision.ops import masks_to_boxes
from torchvision.transforms import InterpolationMode, v2

from ...transforms_config import (
    RESIZING,
    ColorJitterConfig,
    RandomCropConfig,
    RandomRotationConfig,
    RandomShortestSizeConfig,
    RandomVerticalFlipConfig,
    ScaleJitterConfig,
    SimpleCopyPasteConfig,
    TransformConfig,
)
from ..coco.segmentation_masks import resized_mask
from .batches import Sample
from .encoded_images import EncodedImage

# Probability that copy-paste chooses an object of the other image.
_PASTED_SHARE = 0.5


@contextmanager
def random_numbers(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator for a `with` block. Restore the generator's state afterwards."""
    # torch.manual_seed would also seed the generators of the GPUs.
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)


class Augmentation:
    """Random transforms of images with ground truth. They use torch's CPU random generator."""

    def __init__(self, transforms: Sequence[TransformConfig]) -> None:
        """Divide the transforms into resizing (applied first), copy-paste (last), and others."""
        self._resize = next((t for t in transforms if isinstance(t, RESIZING)), None)
        self._paste = next((t for t in transforms if isinstance(t, SimpleCopyPasteConfig)), None)
        special = (*RESIZING, SimpleCopyPasteConfig)
        self._others = [t for t in transforms if not isinstance(t, special)]
        # Whether a transform can change masks in another way than by a flip. If so, the masks of
        # samples must cover the whole image, not only the objects' boxes.
        self.changes_outlines = any(
            isinstance(t, (*special, RandomCropConfig, RandomRotationConfig)) for t in transforms
        )

    def min_size(self, min_size: int) -> int:
        """Return the shorter side of the resized image in pixels.

        If the transform `RandomShortestSize` applies (with its probability `p`), return a random
        one of its sizes. Otherwise, return the argument `min_size`.
        """
        if isinstance(self._resize, RandomShortestSizeConfig) and _happens(self._resize):
            sizes = self._resize.min_size
            return sizes[int(torch.randint(len(sizes), ()))]
        return min_size

    def input_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the height and width of the resized image in pixels.

        If the transform `ScaleJitter` applies (with its probability `p`), return `size` times a
        random factor. Otherwise, return `size`.
        """
        if not isinstance(self._resize, ScaleJitterConfig) or not _happens(self._resize):
            return size
        low, high = self._resize.scale_range
        factor = low + torch.rand(1) * (high - low)
        return max(1, int(size[0] * factor)), max(1, int(size[1] * factor))

    def pastes(self) -> bool:
        """Decide at random whether to paste objects of another image into an image."""
        return self._paste is not None and _happens(self._paste)

    def transform(self, sample: Sample, limits: tuple[int, int]) -> Sample:
        """Apply the transforms other than resizing and copy-paste to a resized sample.

        If the attribute `changes_outlines` is True, the sample must have masks of the whole image.
        Then the result is cropped to `limits` at a random position, its boxes are computed from its
        masks, and objects without a visible pixel are dropped. If the attribute is False, the
        transforms change masks only by flips, so the result needs none of these steps.

        Args:
            sample: Resized image with its ground truth.
            limits: Maximum height and width of the result. Ignored if `changes_outlines` is False.
        """
        height, width = sample.size
        # Copy flipped arrays, because torch supports no negative strides. `np.ascontiguousarray`
        # would not copy an array with only one column.
        pixels = torch.from_numpy(np.array(_pixels_of(sample).transpose(2, 0, 1), order="C"))
        # torchvision expects floats in 0..1, so divide by 255 before the transforms, and multiply
        # afterwards.
        range_ = 255 if pixels.is_floating_point() else 1
        items: dict[str, Any] = {
            "image": tv_tensors.Image(pixels / range_ if range_ > 1 else pixels),
            "masks": tv_tensors.Mask(torch.from_numpy(np.array(sample.masks, order="C"))),
            "boxes": tv_tensors.BoundingBoxes(
                torch.from_numpy(sample.boxes), format="XYXY", canvas_size=(height, width)
            ),
        }
        for config in self._others:
            if _happens(config):
                items = _torchvision_transform(config, items["image"])(items)
        if self.changes_outlines:
            items = _crop(limits, items["image"])(items)
        image = (items["image"] * range_ if range_ > 1 else items["image"]).permute(1, 2, 0)
        sample = sample._replace(
            size=(image.shape[0], image.shape[1]),
            image=image.numpy(),
            masks=items["masks"].numpy(),
            boxes=items["boxes"].numpy(),
        )
        return _without_hidden(sample) if self.changes_outlines else sample


def paste_objects(sample: Sample, source: Sample) -> Sample:
    """Paste random objects of `source` onto `sample`. Align the images at the upper left corner.

    The masks of both samples must be [n, h, w], not cropped to boxes. Objects without a visible
    pixel in the result are dropped.
    """
    chosen = (torch.rand(len(source.labels)) < _PASTED_SHARE).numpy()
    height, width = (min(sides) for sides in zip(sample.size, source.size, strict=True))
    pasted = np.zeros((int(chosen.sum()), *sample.size), np.uint8)
    pasted[:, :height, :width] = source.masks[chosen, :height, :width]
    covered: Any = pasted.any(axis=0)
    image = np.array(_pixels_of(sample))
    inside = covered[:height, :width]
    image[:height, :width][inside] = _pixels_of(source)[:height, :width][inside]
    merged = sample._replace(
        image=image,
        masks=np.concatenate([sample.masks * ~covered, pasted]),
        labels=np.concatenate([sample.labels, source.labels[chosen]]),
    )
    return _without_hidden(merged)


def with_cropped_masks(sample: Sample, side: int | None) -> Sample:
    """Crop each mask of a sample to its box, and resize the crops to [n, side, side].

    If `side` is None, return the sample unchanged.
    """
    if side is None:
        return sample
    masks = np.zeros((len(sample.masks), side, side), np.uint8)
    for crop, mask, box in zip(masks, sample.masks, sample.boxes.tolist(), strict=True):
        crop[:] = resized_mask(mask, (side, side), tuple(box))
    return sample._replace(masks=masks)


def _pixels_of(sample: Sample) -> NDArray[Any]:
    # With transforms, the configuration requires `data.decode=workers`, so images are decoded here.
    assert not isinstance(sample.image, EncodedImage)
    return sample.image


def _without_hidden(sample: Sample) -> Sample:
    """Drop a sample's objects with an empty mask. Replace all boxes by the extents of the masks."""
    visible = sample.masks.any(axis=(1, 2))
    masks = sample.masks[visible]
    boxes: NDArray[np.float32] = masks_to_boxes(torch.from_numpy(masks)).numpy()
    boxes[:, 2:] += 1  # to include the last pixel
    return sample._replace(masks=masks, boxes=boxes, labels=sample.labels[visible])


def _happens(config: TransformConfig) -> bool:
    return bool(torch.rand(1) < config.p)


def _torchvision_transform(config: TransformConfig, image: tv_tensors.Image) -> v2.Transform:
    match config:
        case RandomCropConfig():
            return _crop(config.size, image)
        case RandomRotationConfig():
            return v2.RandomRotation(config.degrees, InterpolationMode.BILINEAR)
        case RandomVerticalFlipConfig():
            return v2.RandomVerticalFlip(p=1)
        case ColorJitterConfig():
            return v2.ColorJitter(config.brightness, config.contrast, config.saturation, config.hue)
    raise AssertionError(config)


def _crop(limits: tuple[int, int], image: tv_tensors.Image) -> v2.Transform:
    height, width = image.shape[-2:]
    return v2.RandomCrop((min(height, limits[0]), min(width, limits[1])))
