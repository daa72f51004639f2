"""Augmentation of training samples, compared with torchvision's transforms applied by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coco_folder import synthetic_config
from torchvision.ops import masks_to_boxes
from torchvision.transforms import InterpolationMode, v2
from torchvision.tv_tensors import BoundingBoxes, Image, Mask

from maskrcnn_trt.training.config import DatasetConfig, TrainConfig
from maskrcnn_trt.training.data.coco.dataset import CocoDataset
from maskrcnn_trt.training.data.loading.augmentation import (
    Augmentation,
    paste_objects,
    random_numbers,
)
from maskrcnn_trt.training.data.loading.batch_reader import BatchReader
from maskrcnn_trt.training.data.loading.batches import Sample
from maskrcnn_trt.training.data.loading.loader import train_loader
from maskrcnn_trt.training.transforms_config import RandomVerticalFlipConfig


def read(dataset: DatasetConfig, *transforms: dict[str, Any], **changes: Any) -> BatchReader:
    config = synthetic_config(dataset, transforms=transforms, flip_probability=0.0, **changes)
    side = config.model.roi.mask_crop_size
    return BatchReader(CocoDataset(dataset), config.data, 0, training=True, mask_crop_size=side)


def torch_seed(position: int) -> int:
    """Seed of torch's generator for a sample of iteration 0 and seed 0."""
    rng = np.random.default_rng([0, 0, position])
    rng.random()
    rng.integers(2**31)
    return int(rng.integers(2**62))


def items(sample: Sample) -> dict[str, Any]:
    boxes = BoundingBoxes(  # type: ignore[call-overload]
        torch.from_numpy(sample.boxes), format="XYXY", canvas_size=sample.size
    )
    image = Image(torch.from_numpy(np.array(sample.image)).permute(2, 0, 1))
    return {"image": image, "masks": Mask(torch.from_numpy(sample.masks.copy())), "boxes": boxes}


EQUAL = {
    "RandomVerticalFlip": ({"p": 1}, lambda: v2.RandomVerticalFlip(p=1)),
    "ColorJitter": (
        {"brightness": 0.4, "contrast": 0.3, "saturation": 0.2, "hue": 0.1},
        lambda: v2.ColorJitter(0.4, 0.3, 0.2, 0.1),
    ),
    "RandomRotation": ({"degrees": 30}, lambda: v2.RandomRotation(30, InterpolationMode.BILINEAR)),
    "RandomCrop": ({"size": [20, 200]}, lambda: v2.RandomCrop((20, 96))),
}


@pytest.mark.parametrize("name", EQUAL)
def test_transforms_equal_torchvisions(synthetic: DatasetConfig, name: str) -> None:
    """Boxes of rotated or cropped objects surround their masks. Hidden objects are dropped."""
    parameters, reference = EQUAL[name]
    plain = read(synthetic)
    changed = read(synthetic, {"name": name, **parameters})
    dropped = 0
    for position in range(6):
        index = plain.buckets.index(0)  # landscape, 64x96
        before, sample = plain.read(index, 0, position), changed.read(index, 0, position)
        with random_numbers(torch_seed(position)):
            torch.rand(1)  # p
            expected = reference()(items(before))
        assert sample.seed == before.seed
        torch.testing.assert_close(torch.tensor(sample.image).permute(2, 0, 1), expected["image"])
        assert sample.size == tuple(expected["image"].shape[-2:])
        boxes, masks, labels = expected["boxes"], expected["masks"], torch.tensor(before.labels)
        if name in ("RandomRotation", "RandomCrop"):
            seen = masks.flatten(1).bool().any(1)
            masks, labels = masks[seen], labels[seen]
            boxes = masks_to_boxes(masks) + torch.tensor([0, 0, 1, 1])
            dropped += int((~seen).sum())
        torch.testing.assert_close(torch.tensor(sample.masks), masks.as_subclass(torch.Tensor))
        torch.testing.assert_close(torch.tensor(sample.boxes), boxes.as_subclass(torch.Tensor))
        assert sample.labels.tolist() == labels.tolist()
    assert dropped > 0 or name != "RandomCrop"


@pytest.mark.parametrize("size", [(96, 1), (1, 1)])
def test_flipped_images_may_have_one_column(size: tuple[int, int]) -> None:
    augmentation = Augmentation([RandomVerticalFlipConfig(name="RandomVerticalFlip", p=1)])
    image, masks = np.ones((*size, 3), np.uint8), np.ones((1, *size), np.uint8)
    boxes, labels = np.array([[0, 0, *size[::-1]]], np.float32), np.ones(1, np.int64)
    flipped = Sample(1, size, size, image[:, ::-1], boxes, labels, masks[:, :, ::-1], 0)
    np.testing.assert_array_equal(augmentation.transform(flipped, size).boxes, boxes)


def test_floats_keep_their_range(synthetic: DatasetConfig) -> None:
    jitter = {"name": "ColorJitter", "brightness": 0.4, "hue": 0.1}
    whole = read(synthetic, jitter).read(0).image
    floats = read(synthetic, jitter, resize="torchvision").read(0).image
    assert floats.dtype == np.float32
    assert np.abs(floats - whole).max() < 5


def test_sizes_equal_torchvisions(synthetic: DatasetConfig) -> None:
    """Images that exceed their bucket are cropped to it."""
    jitter = read(synthetic, {"name": "ScaleJitter", "scale_range": [0.2, 2.0]})
    shortest = read(synthetic, {"name": "RandomShortestSize", "min_size": [32, 40, 48]})
    index = jitter.buckets.index(0)
    image = Image(torch.empty(3, 64, 96, dtype=torch.uint8))
    sizes = set()
    for position in range(8):
        with random_numbers(torch_seed(position)):
            torch.rand(1)  # p
            # torchvision exchanges the sides of the target size.
            expected = v2.ScaleJitter((96, 64), (0.2, 2.0)).make_params([image])["size"]
        found = jitter.read(index, 0, position)
        assert found.size == (min(expected[0], 64), min(expected[1], 96))
        with random_numbers(torch_seed(position)):
            torch.rand(1)  # p
            expected = v2.RandomShortestSize([32, 40, 48], 96).make_params([image])["size"]
        assert shortest.read(index, 0, position).size == expected
        sizes.add(found.size)
    assert (64, 96) in sizes
    assert len(sizes) > 3


def test_scaled_ground_truth_stays_on_its_objects(synthetic: DatasetConfig) -> None:
    plain = read(synthetic)
    half = read(synthetic, {"name": "ScaleJitter", "scale_range": [0.5, 0.5]})
    for index in range(4):
        before, after = plain.read(index), half.read(index)
        assert after.size == (before.size[0] // 2, before.size[1] // 2)
        assert after.labels.tolist() == before.labels.tolist()
        doubled = after.masks.repeat(2, axis=1).repeat(2, axis=2)
        assert (doubled != before.masks).mean() < 0.02
        np.testing.assert_allclose(after.boxes * 2, before.boxes, atol=2.5)


def test_mask_crops_follow_the_boxes(synthetic: DatasetConfig) -> None:
    crop = {"name": "RandomCrop", "size": [40, 60]}
    whole, cropped = read(synthetic, crop), read(synthetic, crop, mask_crop_size=28)
    sample, crops = whole.read(0, 0, 1), cropped.read(0, 0, 1)
    np.testing.assert_array_equal(crops.boxes, sample.boxes)
    assert crops.masks.shape == (len(sample.labels), 28, 28)
    for crop_, mask, box in zip(crops.masks, sample.masks, sample.boxes.astype(int), strict=True):
        inside = mask[box[1] : box[3], box[0] : box[2]]
        assert inside.sum() == mask.sum()
        assert crop_.mean() == pytest.approx(inside.mean(), abs=0.1)


def test_pasted_objects_cover_others(synthetic: DatasetConfig) -> None:
    plain = read(synthetic)
    first, second = (i for i in range(4) if plain.buckets[i] == 0)
    sample, source = plain.read(first), plain.read(second)
    with random_numbers(5):
        chosen = torch.rand(len(source.labels)) < 0.5
    with random_numbers(5):
        merged = paste_objects(sample, source)
    assert 0 < int(chosen.sum()) < len(chosen)
    pasted = source.masks[chosen.numpy()]
    cover = pasted.any(0)
    np.testing.assert_array_equal(merged.image[cover], source.image[cover])
    np.testing.assert_array_equal(merged.image[~cover], sample.image[~cover])
    remaining = sample.masks * ~cover
    seen = remaining.any((1, 2))
    np.testing.assert_array_equal(merged.masks, [*remaining[seen], *pasted])
    labels = [*sample.labels[seen], *source.labels[chosen.numpy()]]
    assert merged.labels.tolist() == labels
    boxes = masks_to_boxes(torch.tensor(merged.masks)) + torch.tensor([0, 0, 1, 1])
    torch.testing.assert_close(torch.tensor(merged.boxes), boxes)


ALL = (
    {"name": "ScaleJitter"}, {"name": "RandomCrop", "size": [60, 60]},
    {"name": "RandomRotation", "degrees": 10, "p": 0.5}, {"name": "RandomVerticalFlip"},
    {"name": "ColorJitter", "hue": 0.1}, {"name": "SimpleCopyPaste", "p": 1},
)  # fmt: skip


def test_batches_depend_on_seed_and_iteration_alone(synthetic: DatasetConfig) -> None:
    """On any number of ranks and passes, with the global generator unchanged."""
    config = synthetic_config(synthetic, transforms=ALL, mask_crop_size=28, max_iterations=3)
    dataset = CocoDataset(synthetic)
    state = torch.get_rng_state()
    whole = list(train_loader(dataset, config))
    assert torch.equal(torch.get_rng_state(), state)
    parts = replace_solver(config, accumulate=2)
    shares = [list(train_loader(dataset, parts, rank=r, world_size=2)) for r in range(2)]
    resumed = list(train_loader(dataset, config, first_iteration=2))
    assert torch.equal(resumed[0].images, whole[2].images)
    for number, batch in enumerate(whole):
        slices = [shares[rank][2 * number + part] for part in range(2) for rank in range(2)]
        assert torch.equal(torch.cat([s.images for s in slices]), batch.images)
        assert torch.equal(torch.cat([s.image_sizes for s in slices]), batch.image_sizes)
        for row, share in enumerate(slices):
            count = share.targets.labels.shape[1]
            assert torch.equal(share.targets.boxes[0], batch.targets.boxes[row, :count])
            assert torch.equal(share.targets.masks[0], batch.targets.masks[row, :count])


def replace_solver(config: TrainConfig, **changes: Any) -> TrainConfig:
    return config.model_copy(update={"solver": config.solver.model_copy(update=changes)})


def test_unreadable_partners_are_not_pasted(synthetic: DatasetConfig, tmp_path: Path) -> None:
    paste = {"name": "SimpleCopyPaste", "p": 1}
    reader = read(synthetic, paste)
    first = reader.buckets.index(0)
    records = [replace(r, path=tmp_path / "gone.jpg") for r in reader.records]
    records[first] = reader.records[first]
    before = read(synthetic).read(first)
    for position in range(3):
        reader.records = tuple(records)
        sample = reader.read(first, 0, position)
        assert set(sample.labels) <= set(before.labels)
