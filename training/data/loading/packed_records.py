"""Image records serialised to one block of bytes, which all data-loading processes share."""

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ....model.masks import Rle
from ..coco.annotations import Instance
from ..coco.dataset import ImageRecord
from ..coco.segmentation_masks import Segmentation


# Forked processes would not keep sharing the memory of a tuple of records: reading a Python object
# changes its reference count, and the operating system then copies the object's memory page.
class PackedRecords:
    """Sequence of image records in one block of bytes. Each access unpacks a record.

    Forked processes share the memory of the block.
    """

    def __init__(self, records: Iterable[ImageRecord]) -> None:
        """Serialise the records one after the other into one block of bytes."""
        packed = [_pack(record) for record in records]
        self._ends = np.cumsum([len(content) for content in packed], dtype=np.int64)
        self._content = b"".join(packed)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> ImageRecord:
        number = range(len(self))[index]
        start = self._ends[number - 1] if number else 0
        return _unpack(memoryview(self._content)[start : self._ends[number]])


def _pack(record: ImageRecord) -> bytes:
    # Convert to plain values first, because pickling the objects takes three times as long.
    instances = [
        (i.annotation_id, i.label, i.bbox, i.area, i.is_crowd, _plain(i.segmentation))
        for i in record.instances
    ]
    fields = record.id, str(record.path), record.height, record.width, record.weight, instances
    return pickle.dumps(fields, pickle.HIGHEST_PROTOCOL)


def _plain(segmentation: Segmentation) -> list[bytes] | tuple[int, int, bytes]:
    if isinstance(segmentation, Rle):
        return segmentation.height, segmentation.width, segmentation.counts
    return [ring.tobytes() for ring in segmentation]


def _unpack(content: memoryview) -> ImageRecord:
    fields: Any = pickle.loads(content)
    id_, path, height, width, weight, packed = fields
    instances = tuple(
        Instance(annotation_id, label, bbox, area, is_crowd, _segmentation(plain))
        for annotation_id, label, bbox, area, is_crowd, plain in packed
    )
    return ImageRecord(id_, Path(path), height, width, instances, weight)


def _segmentation(plain: list[bytes] | tuple[int, int, bytes]) -> Segmentation:
    if isinstance(plain, tuple):
        return Rle(*plain)
    return tuple(np.frombuffer(ring, np.float64) for ring in plain)
