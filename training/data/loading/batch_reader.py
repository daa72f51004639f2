"""Read the images of a batch, resize and flip them, and build their ground truth."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ....model.image_decoding import decode_image
from ....model.image_files import read_image_file
from ....model.image_limits import ImageError
from ....model.resizing import Pixels, resize_image, resized_size, smallest_bucket
from ...config import DataConfig
from ..coco.annotations import Instance
from ..coco.dataset import CocoDataset, DataError, ImageRecord
from ..coco.segmentation_masks import Region, mask_from_segmentation
from .augmentation import Augmentation, paste_objects, random_numbers, with_cropped_masks
from .batches import Batch, EncodedBatch, Sample, batch_from_samples
from .encoded_images import EncodedImage, encoded_image
from .packed_records import PackedRecords
from .sampling import BatchPlan, repeat_factors


class BatchReader(Dataset["Batch | EncodedBatch | DataError"]):
    """PyTorch `Dataset` of batches. An index is a `BatchPlan`, which lists the images of a batch.

    With `data.on_broken` set to "skip", evaluation omits unreadable images, and training replaces
    each by the next image of the same shape bucket (input size).

    Attributes:
        records: Images; `BatchPlan.indices` has indices into this sequence.
        buckets: Index of each image's shape bucket in `data.buckets`.
        repeat_factors: Average number of times that an epoch shows each image.
    """

    def __init__(
        self,
        dataset: CocoDataset,
        config: DataConfig,
        seed: int,
        *,
        training: bool,
        ground_truth: bool = True,
        mask_crop_size: int | None = None,
    ) -> None:
        """Select the images. Training omits images without objects unless `data.keep_empty` is set.

        Args:
            dataset: Data set that contains the images.
            config: Section `data` of the training configuration.
            seed: Seed of the random flips and transforms. Each `Sample.seed` is derived from it.
            training: True: flip and augment images as `config` says, and replace an unreadable
                image by another of the same shape bucket. False: read all images without flips and
                augmentation, and omit unreadable images.
            ground_truth: Include the ground truth in the batches.
            mask_crop_size: Side in pixels of the ground-truth masks, each cropped to the box of its
                object. None: masks have the size of the input.

        Raises:
            DataError: `training` is True, no image has objects, and `data.keep_empty` is False.
        """
        self._config = config
        self._seed = seed
        self._training = training
        self._ground_truth = ground_truth
        self._mask_crop_size = mask_crop_size
        self._augmentation = None
        if training and config.transforms:
            self._augmentation = Augmentation(config.transforms)
        keep_empty = config.keep_empty or not training
        records = [r for r in dataset.records if keep_empty or r.objects]
        if not records:
            raise DataError(
                f"{dataset.name} has no image with an annotated object; to train on images without "
                "objects, set data.keep_empty=true"
            )
        self.records = PackedRecords(records)
        self.buckets = tuple(map(self._bucket_of, records))
        self.repeat_factors = repeat_factors(records, config.repeat_threshold)

    def __getitem__(self, plan: BatchPlan) -> Batch | EncodedBatch | DataError:
        """Read the images of a batch. Return the batch, or an error for the caller to raise."""
        # Return errors, because DataLoader adds the worker's traceback to the message of a raised
        # error.
        samples: list[Sample] = []
        skipped: list[str] = []
        for position, planned in enumerate(plan.indices, start=plan.position):
            for index in self._candidates(planned):
                try:
                    samples.append(self.read(index, plan.iteration, position))
                    break
                except ImageError as error:
                    if self._config.on_broken == "refuse":
                        return DataError(f"{error}; to skip such files, set data.on_broken=skip")
                    skipped.append(str(error))
        bucket = self._config.buckets[plan.bucket]
        if self._training and len(samples) < len(plan.indices):
            return DataError(
                f"none of the training images with input size {bucket} can be read; first error: "
                f"{skipped[0]}"
            )
        return batch_from_samples(
            samples,
            bucket,
            targets=self._ground_truth,
            mask_crop_size=self._mask_crop_size,
            skipped=skipped,
        )

    def _candidates(self, index: int) -> Iterator[int]:
        """Yield `index` and, in training, the indices of images that can replace image `index`."""
        yield index
        if self._training:
            for other in chain(range(index + 1, len(self.records)), range(index)):
                if self.buckets[other] == self.buckets[index]:
                    yield other

    def read(self, index: int, iteration: int = 0, position: int = 0) -> Sample:
        """Read an image, resize and augment it, and build its ground truth.

        Args:
            index: Index into `records`.
            iteration: Training iteration. Together with `position`, it seeds all random choices.
            position: Position of the image in the global batch (images of all ranks).

        Raises:
            ImageError: The file cannot be read, or the image does not have the annotated size.
        """
        # Seed with the position in the global batch, so that the result is independent of the
        # number of data loader workers, ranks and accumulation steps.
        rng = np.random.default_rng([self._seed, iteration, position])
        flip = bool(rng.random() < self._config.flip_probability) and self._training
        seed = int(rng.integers(2**31))
        if self._augmentation is None:
            record = self.records[index]
            size = self._input_size(record)
            return self._sample(record, size, self._mask_crop_size, seed, flip=flip)
        with random_numbers(int(rng.integers(2**62))):
            return self._augmented(self._augmentation, index, seed, flip=flip)

    def _augmented(
        self, augmentation: Augmentation, index: int, seed: int, *, flip: bool
    ) -> Sample:
        side = self._mask_crop_size
        if not augmentation.changes_outlines:
            record = self.records[index]
            size = self._input_size(record)
            plain = self._sample(record, size, side, seed, flip=flip)
            return augmentation.transform(plain, size)
        sample = self._transformed(augmentation, index, seed, flip=flip)
        if augmentation.pastes():
            # Choose another image of the same bucket, so that both have similar sizes.
            others = np.flatnonzero(np.equal(self.buckets, self.buckets[index]))
            other = int(others[int(torch.randint(len(others), ()))])
            flip = bool(torch.rand(1) < self._config.flip_probability)
            try:
                source = self._transformed(augmentation, other, seed, flip=flip)
                sample = paste_objects(sample, source)
            except ImageError:
                if self._config.on_broken == "refuse":
                    raise
        return with_cropped_masks(sample, side)

    def _transformed(
        self, augmentation: Augmentation, index: int, seed: int, *, flip: bool
    ) -> Sample:
        """Read an image, resize it, and apply all transforms except for copy-paste.

        `index` is an index into `records`. `seed` becomes `Sample.seed`. If `flip` is True, the
        image is flipped horizontally before the transforms.

        The result is cropped to the image's shape bucket (input size). Its masks are not cropped to
        the boxes.
        """
        record = self.records[index]
        min_size = augmentation.min_size(self._config.min_size)
        size = augmentation.input_size(self._input_size(record, min_size))
        sample = self._sample(record, size, None, seed, flip=flip)
        return augmentation.transform(sample, self._config.buckets[self.buckets[index]])

    def _sample(
        self,
        record: ImageRecord,
        size: tuple[int, int],
        mask_side: int | None,
        seed: int,
        *,
        flip: bool,
    ) -> Sample:
        """Return an image resized to a height and width, with its ground truth and `seed`.

        `mask_side` is the side in pixels of masks that are cropped to their boxes. None: masks of
        the whole image. If `flip` is True, the image and its ground truth are flipped horizontally.
        """
        height, width = size
        image = self._image_of(record, size, flip=flip)
        objects = record.objects if self._ground_truth else ()
        source = (record.height, record.width)
        regions = [instance.clipped_box(*source) for instance in objects]
        scale = np.array([width / record.width, height / record.height] * 2)
        boxes = np.array(regions).reshape(-1, 4) * scale
        masks = _masks_of(objects, regions, source, size, mask_side)
        if flip:
            masks = masks[:, :, ::-1]
            boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
        labels = np.array([o.label for o in objects], np.int64)
        return Sample(record.id, source, size, image, boxes.astype(np.float32), labels, masks, seed)

    def _image_of(
        self, record: ImageRecord, size: tuple[int, int], *, flip: bool
    ) -> Pixels | EncodedImage:
        """Return the resized pixels [h, w, 3], or the JPEG file if the device will decode it."""
        config = self._config
        if config.decode == "device":
            encoded = encoded_image(record, size, config.resize, flip=flip)
            if encoded is not None:
                return encoded
        image = resize_image(read_image(record, config.exif_orientation), *size, config.resize)
        return image[:, ::-1] if flip else image

    def _input_size(self, record: ImageRecord, min_size: int | None = None) -> tuple[int, int]:
        config = self._config
        min_size = min_size or config.min_size
        return resized_size(record.height, record.width, min_size, config.max_size, config.resize)

    def _bucket_of(self, record: ImageRecord) -> int:
        buckets = self._config.buckets
        return buckets.index(smallest_bucket(*self._input_size(record), buckets))


def _masks_of(
    objects: Sequence[Instance],
    regions: Sequence[Region],
    source: tuple[int, int],
    target: tuple[int, int],
    side: int | None,
) -> NDArray[np.uint8]:
    """Return the masks of n objects.

    If `side` is None, the masks are [n, h, w], and each covers the whole image. Otherwise, they are
    [n, side, side], and each covers the object's box in `regions`. `source` is (height, width) of
    the original image, and `target` is (h, w) of the resized image.
    """
    shape = (side, side) if side else target
    masks = np.zeros((len(objects), *shape), np.uint8)
    for mask, instance, region in zip(masks, objects, regions, strict=True):
        crop = region if side else None
        mask[:] = mask_from_segmentation(instance.segmentation, source, shape, crop)
    return masks


def read_image(
    record: ImageRecord, exif_orientation: Literal["apply", "ignore"] = "apply"
) -> NDArray[np.uint8]:
    """Decode an image file to RGB `[H, W, 3]`, in the orientation in which it was annotated.

    Args:
        record: Record with the path and the annotated size of the image.
        exif_orientation: Whether to apply the EXIF rotation if the annotated size fits the image
            both with and without the rotation.

    Raises:
        ImageError: The file cannot be read or decoded, or does not have the annotated size.
    """
    try:
        data = read_image_file(record.path)
        # Only some annotation tools apply the EXIF orientation, so decode with and without it until
        # the size is the annotated size.
        is_applied = exif_orientation == "apply"
        for apply_orientation in (is_applied, not is_applied):
            image = decode_image(data, apply_orientation=apply_orientation)
            if image.shape[:2] == (record.height, record.width):
                return image
    except OSError as error:
        raise ImageError(f"{record.path}: {error.strerror}") from None
    except ImageError as error:
        raise ImageError(f"{record.path}: {error}") from None
    raise ImageError(
        f"{record.path}: the image is {image.shape[0]}x{image.shape[1]} pixels, but annotated as "
        f"{record.height}x{record.width} (height x width)"
    )
