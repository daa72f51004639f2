"""Reading: from a planned batch to pixels and ground truth."""

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ...model.images import (
    ImageError,
    decode_image,
    resize_image,
    resized_size,
    smallest_bucket,
)
from ..config import DataConfig
from .batches import Batch, EncodedBatch, Sample, batch_from_samples
from .coco import CocoDataset, DataError, ImageRecord
from .encoded_images import EncodedImage, encoded_image
from .instances import Instance, Region, draw_mask
from .sampling import BatchPlan


class BatchReader(Dataset["Batch | EncodedBatch | DataError"]):
    """Batches by plan.

    A file that cannot be read is, where broken files are skipped, replaced in training by the
    next image of its bucket, and left out in evaluation.

    Attributes:
        records: the images that plans refer to by index.
        buckets: index of each image's shape bucket in the configuration.
    """

    def __init__(
        self,
        dataset: CocoDataset,
        config: DataConfig,
        seed: int,
        *,
        training: bool,
        mask_crop_size: int | None = None,
    ) -> None:
        """Choose the images.

        Args:
            dataset: where they come from.
            config: how they become model input.
            seed: fixes flips and what the model draws.
            training: with ground truth, flips and, unless configured otherwise, only images with
                objects; evaluation reads every image as it is.
            mask_crop_size: pixels a side of ground-truth masks cropped to their boxes; none, masks
                have the size of the input.

        Raises:
            DataError: there is nothing to train on.
        """
        self._config = config
        self._seed = seed
        self._training = training
        self._mask_crop_size = mask_crop_size
        keep_empty = config.keep_empty or not training
        self.records = tuple(r for r in dataset.records if keep_empty or r.objects)
        if not self.records:
            raise DataError(
                f"{dataset.name} has no image with an annotation to train on; data.keep_empty=true "
                "trains on empty images too"
            )
        self.buckets = tuple(map(self._bucket_of, self.records))

    def __getitem__(self, plan: BatchPlan) -> Batch | EncodedBatch | DataError:
        """The planned batch; an error is returned, so that it leaves a worker as it is."""
        samples: list[Sample] = []
        skipped: list[str] = []
        for place, planned in enumerate(plan.indices):
            for index in self._candidates(planned):
                try:
                    samples.append(self._read(index, plan, place))
                    break
                except ImageError as error:
                    if self._config.on_broken == "refuse":
                        return DataError(f"{error}; data.on_broken=skip leaves such files out")
                    skipped.append(str(error))
        if self._training and len(samples) < len(plan.indices):
            return DataError(f"no image of a whole shape bucket can be read: {skipped[0]}")
        bucket = self._config.buckets[plan.bucket]
        return batch_from_samples(
            samples,
            bucket,
            targets=self._training,
            mask_crop_size=self._mask_crop_size,
            skipped=skipped,
        )

    def _candidates(self, index: int) -> Iterator[int]:
        """An image and, in training, those that replace it: the next ones of its bucket."""
        yield index
        if self._training:
            for other in chain(range(index + 1, len(self.records)), range(index)):
                if self.buckets[other] == self.buckets[index]:
                    yield other

    def _read(self, index: int, plan: BatchPlan, place: int) -> Sample:
        # Keyed by the place in the global batch, not drawn in sequence: the same for any number
        # of workers, ranks and accumulated parts.
        rng = np.random.default_rng([self._seed, plan.iteration, plan.position + place])
        flip = bool(rng.random() < self._config.flip_probability) and self._training
        return self._sample_from(self.records[index], flip=flip, seed=int(rng.integers(2**31)))

    def _sample_from(self, record: ImageRecord, *, flip: bool, seed: int) -> Sample:
        height, width = size = self._input_size(record)
        image = self._image_of(record, size, flip=flip)
        objects = record.objects if self._training else ()
        source = (record.height, record.width)
        regions = [instance.clipped_box(*source) for instance in objects]
        scale = np.array([width / record.width, height / record.height] * 2)
        boxes = np.array(regions).reshape(-1, 4) * scale
        masks = self._masks_of(objects, regions, source, size)
        if flip:
            masks = masks[:, :, ::-1]
            boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
        labels = np.array([o.label for o in objects], np.int64)
        return Sample(record.id, source, size, image, boxes.astype(np.float32), labels, masks, seed)

    def _image_of(
        self, record: ImageRecord, size: tuple[int, int], *, flip: bool
    ) -> NDArray[np.uint8] | EncodedImage:
        """Pixels [h, w, 3], or the file for the device to decode."""
        if self._config.decode == "device":
            encoded = encoded_image(record, size, flip=flip)
            if encoded is not None:
                return encoded
        image = resize_image(read_image(record), *size)
        return image[:, ::-1] if flip else image

    def _masks_of(
        self,
        objects: Sequence[Instance],
        regions: Sequence[Region],
        source: tuple[int, int],
        target: tuple[int, int],
    ) -> NDArray[np.uint8]:
        """Masks of the input's size, or crops of the objects' regions."""
        size = self._mask_crop_size
        shape = (size, size) if size else target
        masks = np.zeros((len(objects), *shape), np.uint8)
        for mask, instance, region in zip(masks, objects, regions, strict=True):
            mask[:] = draw_mask(instance.segmentation, source, shape, region if size else None)
        return masks

    def _input_size(self, record: ImageRecord) -> tuple[int, int]:
        config = self._config
        return resized_size(record.height, record.width, config.min_size, config.max_size)

    def _bucket_of(self, record: ImageRecord) -> int:
        buckets = self._config.buckets
        return buckets.index(smallest_bucket(*self._input_size(record), buckets))


def read_image(record: ImageRecord) -> NDArray[np.uint8]:
    """Pixels `[H, W, 3]` in the orientation that was annotated.

    Raises:
        ImageError: the file cannot be read, or is not the picture that was annotated.
    """
    try:
        data = record.path.read_bytes()
        # Annotation tools differ in whether they obey a camera's orientation tag; the annotated
        # size tells which did.
        for apply_orientation in (False, True):
            image = decode_image(data, apply_orientation=apply_orientation)
            if image.shape[:2] == (record.height, record.width):
                return image
    except OSError as error:
        raise ImageError(f"{record.path}: {error.strerror}") from None
    except ImageError as error:
        raise ImageError(f"{record.path}: {error}") from None
    raise ImageError(
        f"{record.path}: the image is {image.shape[0]}x{image.shape[1]} pixels, but annotated as "
        f"{record.height}x{record.width}"
    )
