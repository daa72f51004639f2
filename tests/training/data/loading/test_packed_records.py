"""Records of images that data-loading processes share."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from coco_folder import valid_content, write_folder

from maskrcnn_trt.model.masks import Rle
from maskrcnn_trt.training.data.coco.dataset import CocoDataset, ImageRecord
from maskrcnn_trt.training.data.loading.packed_records import PackedRecords


@pytest.fixture
def records(tmp_path: Path) -> list[ImageRecord]:
    """Images with polygons, with RLE, and without objects."""
    records = list(CocoDataset(write_folder(tmp_path, valid_content())).records)
    records[0] = replace(records[0], weight=2.5)
    kinds = {type(i.segmentation) for record in records for i in record.instances}
    assert kinds == {tuple, Rle}
    assert not records[-1].instances
    return records


def test_records_are_unpacked_unchanged(records: list[ImageRecord]) -> None:
    packed = PackedRecords(records)
    assert len(packed) == len(records)
    for own, record in zip(packed, records, strict=True):
        assert replace(own, instances=()) == replace(record, instances=())
        for instance, original in zip(own.instances, record.instances, strict=True):
            empty = {"segmentation": ()}
            assert replace(instance, **empty) == replace(original, **empty)
            assert type(instance.segmentation) is type(original.segmentation)
            for part, wanted in zip(instance.segmentation, original.segmentation, strict=True):
                np.testing.assert_array_equal(part, wanted)


def test_records_are_indexed_like_a_list(records: list[ImageRecord]) -> None:
    packed = PackedRecords(records)
    ids = [record.id for record in records]
    assert packed[-1].id == ids[-1]
    with pytest.raises(IndexError):
        packed[len(records)]
    assert list(PackedRecords([])) == []
