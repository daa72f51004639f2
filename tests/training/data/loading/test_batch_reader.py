import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from coco_folder import (
    HEIGHT,
    WIDTH,
    make_config,
    ring_mask,
    synthetic_config,
    valid_content,
    write_folder,
    write_image,
)
from PIL import Image
from torchvision.transforms.v2 import functional
from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat, Mask

from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.training.config import DatasetConfig
from maskrcnn_trt.training.data.coco.dataset import CocoDataset, DataError
from maskrcnn_trt.training.data.coco.training_set import load_training_set
from maskrcnn_trt.training.data.loading.loader import eval_loader, train_loader


def test_batch_holds_images_and_padded_ground_truth(tmp_path: Path) -> None:
    config = make_config(write_folder(tmp_path, valid_content()), flip_probability=0.0)
    dataset = CocoDataset(config.data.train)
    batches = list(train_loader(dataset, config))
    assert len(batches) == 6
    landscape = next(b for b in batches if b.images.shape[2] == 128)
    assert landscape.images.shape == (4, 3, 128, 160)
    assert landscape.images.dtype == torch.uint8
    assert landscape.image_ids.sort().values.tolist() == [5, 8, 9, 11]
    assert landscape.image_sizes.tolist() == landscape.source_sizes.tolist() == [[128, 160]] * 4
    targets = landscape.targets
    assert targets is not None
    assert targets.boxes.shape == (4, 2, 4)
    assert targets.masks.shape == (4, 2, 128, 160)
    row = landscape.image_ids.tolist().index(8)
    assert targets.labels[row].tolist() == [1, 2]
    np.testing.assert_array_equal(targets.masks[row, 0], ring_mask())
    np.testing.assert_array_equal(targets.masks[row, 1], ring_mask())
    assert targets.boxes[row].tolist() == [[41, 25, 120, 104]] * 2
    for empty in (9, 11):
        row = landscape.image_ids.tolist().index(empty)
        assert not any(part[row].any() for part in targets)
    portrait = next(b for b in batches if b.images.shape[2] == 160)
    np.testing.assert_array_equal(
        portrait.images[0].permute(1, 2, 0), np.asarray(Image.open(tmp_path / "2.png"))
    )


def test_images_and_ground_truth_are_resized_together(tmp_path: Path) -> None:
    buckets = (ShapeBucket(64, 96), ShapeBucket(96, 64))
    config = make_config(
        write_folder(tmp_path, valid_content()),
        min_size=64, max_size=90, buckets=buckets, flip_probability=0.0,
    )  # fmt: skip
    dataset = CocoDataset(config.data.train)
    batch = next(b for b in train_loader(dataset, config) if b.images.shape[2] == 64)
    row = batch.image_ids.tolist().index(8)
    assert batch.image_sizes[row].tolist() == [64, 80]
    assert batch.targets is not None
    assert batch.targets.boxes[row, 0].tolist() == [20.5, 12.5, 60, 52]
    assert not batch.images[:, :, :, 80:].any()
    mask = batch.targets.masks[row, 0]
    assert not mask[:, 80:].any()
    assert mask.sum() == pytest.approx(ring_mask().sum() / 4, rel=0.02)
    row = batch.image_ids.tolist().index(5)
    expected = np.zeros((64, 96), np.uint8)
    expected[10:30, 5:20] = 1
    np.testing.assert_array_equal(batch.targets.masks[row, 0], expected)


def test_flip_equals_torchvision(synthetic: DatasetConfig) -> None:
    config = synthetic_config(synthetic, flip_probability=0.0)
    dataset = CocoDataset(synthetic)
    flipped = synthetic_config(synthetic, flip_probability=1.0)
    for ours, plain in zip(
        train_loader(dataset, flipped), train_loader(dataset, config), strict=True
    ):
        assert ours.targets is not None
        assert plain.targets is not None
        torch.testing.assert_close(ours.images, functional.hflip(plain.images))
        torch.testing.assert_close(ours.targets.masks, functional.hflip(Mask(plain.targets.masks)))
        height, width = plain.images.shape[2:]
        boxes = BoundingBoxes(
            plain.targets.boxes.flatten(0, 1),
            format=BoundingBoxFormat.XYXY,
            canvas_size=(height, width),
        )
        real = (plain.targets.labels > 0).flatten()
        torch.testing.assert_close(
            ours.targets.boxes.flatten(0, 1)[real],
            functional.hflip(boxes)[real].as_subclass(torch.Tensor),
        )


def test_about_half_of_the_images_are_flipped(synthetic: DatasetConfig) -> None:
    dataset = CocoDataset(synthetic)
    config = synthetic_config(synthetic, max_iterations=30)
    plain = synthetic_config(synthetic, max_iterations=30, flip_probability=0.0)
    pairs = zip(train_loader(dataset, config), train_loader(dataset, plain), strict=True)
    changed = [(a.images != b.images).flatten(1).any(1) for a, b in pairs]
    assert 0.35 < torch.cat(changed).float().mean() < 0.65


def test_images_without_objects_are_left_out_unless_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their number is logged. A data set without objects is an error."""
    config = make_config(write_folder(tmp_path, valid_content()), keep_empty=False)
    with caplog.at_level(logging.INFO):
        dataset = load_training_set(config.data)
    assert "without objects are left out: 2 " in caplog.text
    seen = {i for batch in train_loader(dataset, config) for i in batch.image_ids.tolist()}
    assert seen == {2, 5, 8}
    content = {**valid_content(), "annotations": []}
    (tmp_path / "empty").mkdir()
    config = make_config(write_folder(tmp_path / "empty", content), keep_empty=False)
    with pytest.raises(DataError, match=r"data\.keep_empty=true"):
        train_loader(CocoDataset(config.data.train), config)
    config = make_config(config.data.train)
    batch = next(iter(train_loader(CocoDataset(config.data.train), config)))
    assert batch.targets is not None
    assert batch.targets.labels.shape == (4, 1)


def test_a_bucket_without_a_readable_image_is_an_error(tmp_path: Path) -> None:
    """An image of another size than annotated is not readable either."""
    dataset_config = write_folder(tmp_path, valid_content())
    (tmp_path / "2.png").write_bytes(b"no image")
    config = make_config(dataset_config)
    with pytest.raises(DataError, match=r"none of the training images with input size .*2\.png"):
        list(train_loader(CocoDataset(dataset_config), config))
    for ground_truth in (False, True):
        batches = eval_loader(CocoDataset(dataset_config), config, ground_truth=ground_truth)
        assert sorted(i for b in batches for i in b.image_ids) == [5, 8, 9, 11]
    write_image(tmp_path / "2.png", 64, 64)
    config = make_config(dataset_config, on_broken="refuse")
    with pytest.raises(DataError, match="64x64 pixels, but annotated as 160x128"):
        list(eval_loader(CocoDataset(dataset_config), config))


@pytest.mark.parametrize("orientation", [3, 6])
@pytest.mark.parametrize("rule", ["apply", "ignore"])
@pytest.mark.parametrize("decode", ["workers", "device"])
def test_the_rule_for_orientations_that_the_annotated_size_does_not_show(
    orientation: int, rule: str, decode: str, tmp_path: Path
) -> None:
    content = valid_content()
    content["annotations"] = content["annotations"][:1]
    entry = next(image for image in content["images"] if image["id"] == 5)
    entry["width"] = entry["height"]
    folder = write_folder(tmp_path, content)
    exif = Image.Exif()
    exif[0x0112] = orientation
    write_image(tmp_path / "5.jpg", HEIGHT, HEIGHT, exif=exif)
    settings = {"exif_orientation": rule, "decode": decode, "flip_probability": 0.0}
    config = make_config(folder, keep_empty=False, min_size=HEIGHT, max_size=WIDTH, **settings)
    batch = next(iter(train_loader(CocoDataset(config.data.train), config))).to(torch.device("cpu"))
    pixels = np.asarray(Image.open(tmp_path / "5.jpg"))
    if rule == "apply":
        pixels = np.rot90(pixels, {3: 2, 6: -1}[orientation])
    np.testing.assert_array_equal(batch.images[0].permute(1, 2, 0)[:HEIGHT, :HEIGHT], pixels)


@pytest.mark.parametrize("decode", ["workers", "device"])
@pytest.mark.parametrize("rule", ["detectron2", "torchvision"])
def test_images_are_resized_by_the_rule(rule: str, decode: str, tmp_path: Path) -> None:
    content = valid_content()
    content["annotations"] = content["annotations"][:1]
    settings = {"resize": rule, "decode": decode, "flip_probability": 0.0, "keep_empty": False}
    buckets = (ShapeBucket(64, 96), ShapeBucket(96, 64))
    folder = write_folder(tmp_path, content)
    write_image(tmp_path / "5.jpg", HEIGHT, WIDTH, quality=98, subsampling=0)
    config = make_config(folder, min_size=63, max_size=90, buckets=buckets, **settings)
    batch = next(iter(train_loader(CocoDataset(config.data.train), config))).to(torch.device("cpu"))
    image = Image.open(tmp_path / "5.jpg")
    # 128x160 pixels become 63x78.75.
    if rule == "torchvision":
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
        expected = torch.nn.functional.interpolate(pixels, (63, 78), mode="bilinear")[0]
    else:
        resized = np.array(image.resize((79, 63), Image.Resampling.BILINEAR))
        expected = torch.from_numpy(resized).permute(2, 0, 1)
    height, width = expected.shape[1:]
    assert batch.image_sizes[0].tolist() == [height, width]
    assert batch.images.dtype == expected.dtype
    difference = (batch.images[0, :, :height, :width].float() - expected.float()).abs()
    assert difference.max() <= 3  # decoders differ
    assert difference.mean() < 0.5


@pytest.mark.parametrize("annotated_upright", [False, True])
def test_exif_rotation_is_applied_if_annotated_so(tmp_path: Path, annotated_upright: bool) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    write_image(tmp_path / "5.jpg", HEIGHT, WIDTH, exif=exif)
    content = valid_content()
    if annotated_upright:
        entry = next(image for image in content["images"] if image["id"] == 5)
        entry.update(height=WIDTH, width=HEIGHT)
    content["annotations"] = content["annotations"][:1]
    config = make_config(write_folder(tmp_path, content), keep_empty=False, flip_probability=0.0)
    batch = next(iter(train_loader(CocoDataset(config.data.train), config)))
    stored = np.asarray(Image.open(tmp_path / "5.jpg"))
    expected = np.rot90(stored, -1) if annotated_upright else stored
    np.testing.assert_array_equal(batch.images[0].permute(1, 2, 0), expected)


@pytest.mark.parametrize("name", ["5.tiff", "5.bmp"])
def test_bmp_and_tiff_are_read(tmp_path: Path, name: str) -> None:
    write_image(tmp_path / name, HEIGHT, WIDTH)
    content = valid_content()
    next(image for image in content["images"] if image["id"] == 5)["file_name"] = name
    content["annotations"] = content["annotations"][:1]
    config = make_config(write_folder(tmp_path, content), keep_empty=False, flip_probability=0.0)
    batch = next(iter(train_loader(CocoDataset(config.data.train), config)))
    expected = np.asarray(Image.open(tmp_path / name))
    np.testing.assert_array_equal(batch.images[0].permute(1, 2, 0), expected)
