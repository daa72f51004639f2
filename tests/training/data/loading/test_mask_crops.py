"""Ground-truth masks cropped to their boxes, compared with masks of whole images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coco_folder import annotation, make_config, synthetic_config, valid_content, write_folder
from numpy.typing import NDArray
from pycocotools import mask as coco_mask
from torch import Tensor
from torchvision.ops import roi_align

from maskrcnn_trt.training.config import DatasetConfig
from maskrcnn_trt.training.data.coco.annotations import Instance, coco_from_segmentation
from maskrcnn_trt.training.data.coco.dataset import CocoDataset, ImageRecord
from maskrcnn_trt.training.data.coco.segmentation_masks import mask_from_segmentation
from maskrcnn_trt.training.data.loading.batches import Batch
from maskrcnn_trt.training.data.loading.loader import train_loader

SIDE = 56


def whole_mask(instance: Instance, record: ImageRecord, magnified: int) -> NDArray[np.uint8]:
    """Rasterize an instance on the whole, magnified image with pycocotools."""
    content: Any = coco_from_segmentation(instance.segmentation)
    if isinstance(content, dict):
        pixel = np.ones((magnified, magnified), np.uint8)
        decoded: NDArray[np.uint8] = np.kron(coco_mask.decode(content), pixel)
        return decoded
    rings = [(np.array(ring) * magnified).tolist() for ring in content]
    rles = coco_mask.frPyObjects(rings, record.height * magnified, record.width * magnified)
    mask: NDArray[np.uint8] = coco_mask.decode(coco_mask.merge(rles))
    return mask


def crop_of(mask: NDArray[np.uint8], box: tuple[float, ...], magnified: int) -> Tensor:
    """Return the covered share of each of SIDE x SIDE cells of a box."""
    image = torch.from_numpy(mask).float()[None, None]
    cells: Tensor = roi_align(
        image, [torch.tensor([box], dtype=torch.float32) * magnified], SIDE, aligned=True
    )
    return cells[0, 0]


def test_crops_equal_those_of_whole_masks(synthetic: DatasetConfig, tmp_path: Path) -> None:
    shapes, hand_made = CocoDataset(synthetic), CocoDataset(write_folder(tmp_path, valid_content()))
    seen = 0
    for record in (*shapes.records, *hand_made.records):
        source = (record.height, record.width)
        for instance in record.objects:
            box = instance.clipped_box(*source)
            ours = mask_from_segmentation(instance.segmentation, source, (SIDE, SIDE), box)
            wanted = crop_of(whole_mask(instance, record, 8), box, 8)
            # Only cells on an outline may differ.
            assert (np.abs(ours - wanted.numpy()) > 0.6).mean() < 0.025
            assert abs(ours.mean() - wanted.mean()) < 0.01
            seen += 1
    assert seen > 50


def batches(dataset: DatasetConfig, **changes: Any) -> list[Batch]:
    config = synthetic_config(dataset, mask_crop_size=SIDE, **changes)
    return list(train_loader(CocoDataset(dataset), config))


def test_flipped_crops_are_mirrored(synthetic: DatasetConfig) -> None:
    pairs = zip(
        batches(synthetic, flip_probability=0.0),
        batches(synthetic, flip_probability=1.0),
        strict=True,
    )
    for plain, flipped in pairs:
        assert plain.targets is not None
        assert flipped.targets is not None
        assert plain.targets.masks.any()
        torch.testing.assert_close(flipped.targets.masks, plain.targets.masks.flip(3))


def test_images_without_objects_have_empty_crops(tmp_path: Path) -> None:
    config = make_config(write_folder(tmp_path, valid_content()), mask_crop_size=SIDE)
    for batch in train_loader(CocoDataset(config.data.train), config):
        assert batch.targets is not None
        assert batch.targets.masks.shape == (4, batch.targets.labels.shape[1], SIDE, SIDE)
        real = batch.targets.labels > 0
        assert batch.targets.masks[real].flatten(1).any(1).all()
        assert not batch.targets.masks[~real].any()
    alone = {**valid_content(), "annotations": []}
    config = make_config(write_folder(tmp_path, alone), mask_crop_size=SIDE)
    batch = next(iter(train_loader(CocoDataset(config.data.train), config)))
    assert batch.targets is not None
    assert batch.targets.masks.shape == (4, 1, SIDE, SIDE)


BOXES = {
    "hair": ([10, 20, 1e-9, 40], 1.0),
    "grain": ([39.9999999, 20, 1e-7, 1e-7], 1.0),
    "beside its outline": ([100, 100, 1e-6, 1e-6], 0.0),
    "over two borders": ([-5, -10, 20, 40], None),
}


@pytest.mark.parametrize("name", BOXES)
def test_boxes_of_any_size_can_be_cropped(tmp_path: Path, name: str) -> None:
    box, share = BOXES[name]
    content = {**valid_content(), "annotations": [annotation(1, 5, bbox=box)]}
    record = CocoDataset(write_folder(tmp_path, content)).records[1]
    source, (instance,) = (record.height, record.width), record.objects
    mask = mask_from_segmentation(
        instance.segmentation, source, (SIDE, SIDE), instance.clipped_box(*source)
    )
    if share is None:  # 15x30 pixels are within the image, and the outline begins at 10, 20
        expected = np.zeros((SIDE, SIDE), np.uint8)
        expected[round(SIDE * 20 / 30) :, round(SIDE * 10 / 15) :] = 1
        np.testing.assert_array_equal(mask, expected)
    else:
        assert mask.mean() == share


def test_a_box_of_almost_no_width_can_be_cropped() -> None:
    """An infinite scale would make the coordinate 0 NaN, which ends the process in pycocotools."""
    triangle = (np.array([0.0, 0, 10, 0, 10, 10]),)
    mask = mask_from_segmentation(triangle, (64, 96), (SIDE, SIDE), (0.0, 0.0, 1e-310, 5.0))
    assert mask.shape == (SIDE, SIDE)
