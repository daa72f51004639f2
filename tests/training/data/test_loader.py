import logging
import multiprocessing
import os
import time
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from coco_folder import HEIGHT, WIDTH, ring_mask, sound_content, write_folder, write_image
from maskrcnn_trt.model.spec import ShapeBucket
from maskrcnn_trt.training.config import DataConfig, DatasetConfig, SolverConfig, TrainConfig
from maskrcnn_trt.training.data.batches import Batch
from maskrcnn_trt.training.data.coco import CocoDataset, DataError
from maskrcnn_trt.training.data.loader import eval_loader, train_loader
from maskrcnn_trt.training.data.synthetic import SyntheticConfig, draw_dataset
from PIL import Image
from torchvision.transforms.v2 import functional
from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat, Mask

# From Python 3.12 on, forking where threads run is warned of; workers start before any matters.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def make_config(dataset: DatasetConfig, **changes: Any) -> TrainConfig:
    """Inputs as large as the images of the hand-made data set, unless changed."""
    solver = {"images_per_batch": 4, "max_iterations": 6, "steps": ()}
    data = {
        "train": dataset,
        "min_size": 128,
        "max_size": 160,
        "buckets": (ShapeBucket(128, 160), ShapeBucket(160, 128)),
        "workers": 0,
        "keep_empty": True,
    }
    data |= {key: value for key, value in changes.items() if key in DataConfig.model_fields}
    solver |= {key: value for key, value in changes.items() if key in SolverConfig.model_fields}
    return TrainConfig(
        data=DataConfig(**data), solver=SolverConfig(**solver), seed=changes.get("seed", 0)
    )


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> DatasetConfig:
    folder = tmp_path_factory.mktemp("synthetic")
    draw_dataset(folder, SyntheticConfig(train=14, val=1, width=96, height=64, seed=3))
    return DatasetConfig(images=folder / "train", annotations=folder / "annotations/train.json")


def synthetic_config(dataset: DatasetConfig, **changes: Any) -> TrainConfig:
    sizes = {"min_size": 64, "max_size": 96, "buckets": (ShapeBucket(64, 96), ShapeBucket(96, 64))}
    return make_config(dataset, **{**sizes, **changes})


def assert_equal(first: Batch, second: Batch) -> None:
    for name in ("images", "image_sizes", "image_ids", "source_sizes", "seeds"):
        torch.testing.assert_close(getattr(first, name), getattr(second, name), rtol=0, atol=0)
    assert first.targets is not None
    assert second.targets is not None
    for ours, theirs in zip(first.targets, second.targets, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_batch_holds_images_and_padded_ground_truth(tmp_path: Path) -> None:
    config = make_config(write_folder(tmp_path, sound_content()), flip_probability=0.0)
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
        write_folder(tmp_path, sound_content()),
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


def test_workers_change_nothing(synthetic: DatasetConfig) -> None:
    dataset = CocoDataset(synthetic)
    alone = train_loader(dataset, synthetic_config(synthetic, workers=0))
    helped = train_loader(dataset, synthetic_config(synthetic, workers=2))
    assert len(alone) == len(helped) == 6
    for first, second in zip(alone, helped, strict=True):
        assert_equal(first, second)


def test_resuming_equals_going_on(synthetic: DatasetConfig) -> None:
    dataset = CocoDataset(synthetic)
    config = synthetic_config(synthetic, max_iterations=9, accumulate=2)
    state = torch.get_rng_state()
    whole = list(train_loader(dataset, config))
    resumed = list(train_loader(dataset, config, first_iteration=4))
    for first, second in zip(whole[8:], resumed, strict=True):
        assert_equal(first, second)
    torch.testing.assert_close(torch.get_rng_state(), state)


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (1, 2), (2, 2)])
def test_images_are_treated_alike_however_a_batch_is_cut(
    synthetic: DatasetConfig, world_size: int, accumulate: int
) -> None:
    dataset = CocoDataset(synthetic)
    whole = list(train_loader(dataset, synthetic_config(synthetic)))
    config = synthetic_config(synthetic, accumulate=accumulate)
    ranks = [
        list(train_loader(dataset, config, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    for iteration, batch in enumerate(whole):
        slices = [
            plans[iteration * accumulate + part] for part in range(accumulate) for plans in ranks
        ]
        for name in ("images", "image_ids", "seeds"):
            together = torch.cat([getattr(piece, name) for piece in slices])
            torch.testing.assert_close(together, getattr(batch, name), rtol=0, atol=0)


def test_seeds_differ_between_images_and_iterations(synthetic: DatasetConfig) -> None:
    batches = list(train_loader(CocoDataset(synthetic), synthetic_config(synthetic)))
    seeds = torch.cat([batch.seeds for batch in batches])
    assert seeds.dtype == torch.int64
    assert len(seeds.unique()) == len(seeds)


def test_evaluation_reads_every_image_once(tmp_path: Path) -> None:
    config = make_config(write_folder(tmp_path, sound_content()))
    dataset = CocoDataset(config.data.train)
    ranks = [eval_loader(dataset, config, rank=rank, world_size=2) for rank in range(2)]
    assert [len(loader) for loader in ranks] == [1, 1]
    batches = [batch for loader in ranks for batch in loader]
    assert sorted(i for b in batches for i in b.image_ids.tolist()) == [2, 5, 8, 9, 11]
    assert all(batch.targets is None for batch in batches)
    assert all(batch.images.shape[0] == len(batch.source_sizes) for batch in batches)


def test_images_without_objects_are_left_out_unless_kept(tmp_path: Path) -> None:
    config = make_config(write_folder(tmp_path, sound_content()), keep_empty=False)
    dataset = CocoDataset(config.data.train)
    seen = {i for batch in train_loader(dataset, config) for i in batch.image_ids.tolist()}
    assert seen == {2, 5, 8}


def test_nothing_to_train_on_is_said(tmp_path: Path) -> None:
    content = {**sound_content(), "annotations": []}
    config = make_config(write_folder(tmp_path, content), keep_empty=False)
    with pytest.raises(DataError, match=r"no image with an annotation.*data.keep_empty=true"):
        train_loader(CocoDataset(config.data.train), config)
    config = make_config(config.data.train)
    batch = next(iter(train_loader(CocoDataset(config.data.train), config)))
    assert batch.targets is not None
    assert batch.targets.labels.shape == (4, 1)


def test_batch_size_must_divide(synthetic: DatasetConfig) -> None:
    with pytest.raises(DataError, match="images_per_batch 4 does not divide by 3 ranks"):
        train_loader(CocoDataset(synthetic), synthetic_config(synthetic), world_size=3)


BROKEN = {
    "truncated": lambda data: data[: len(data) // 2],
    "text": lambda data: b"not an image",
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files_are_replaced_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, workers: int
) -> None:
    dataset_config = write_folder(tmp_path, sound_content())
    path = tmp_path / "8.jpg"
    path.write_bytes(BROKEN[kind](path.read_bytes()))
    config = make_config(dataset_config, workers=workers)
    dataset = CocoDataset(dataset_config)
    with caplog.at_level(logging.WARNING):
        first, second = (list(train_loader(dataset, config)) for _ in range(2))
        evaluated = list(eval_loader(dataset, config))
    for one, other in zip(first, second, strict=True):
        assert_equal(one, other)
    landscape = next(b for b in first if b.images.shape[2] == 128)
    assert sorted(landscape.image_ids.tolist()) == [5, 9, 9, 11]
    assert sorted(i for b in evaluated for i in b.image_ids.tolist()) == [2, 5, 9, 11]
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 3
    assert all("8.jpg: " in w and "(broken files so far: 1)" in w for w in warnings)


@pytest.mark.parametrize("workers", [0, 1])
def test_broken_files_are_refused(tmp_path: Path, workers: int) -> None:
    dataset_config = write_folder(tmp_path, sound_content())
    (tmp_path / "8.jpg").write_bytes(b"no image")
    config = make_config(dataset_config, workers=workers, on_broken="refuse")
    for loader in (train_loader, eval_loader):
        with pytest.raises(DataError, match=r"^[^\n]*8\.jpg: [^\n]*data.on_broken=skip[^\n]*$"):
            list(loader(CocoDataset(dataset_config), config))


def test_bucket_without_a_readable_image_is_said(tmp_path: Path) -> None:
    dataset_config = write_folder(tmp_path, sound_content())
    (tmp_path / "2.png").write_bytes(b"no image")
    config = make_config(dataset_config)
    with pytest.raises(DataError, match=r"no image of a whole shape bucket .*2\.png"):
        list(train_loader(CocoDataset(dataset_config), config))
    ids = [i for b in eval_loader(CocoDataset(dataset_config), config) for i in b.image_ids]
    assert sorted(ids) == [5, 8, 9, 11]


def test_image_of_another_size_than_annotated_is_broken(tmp_path: Path) -> None:
    dataset_config = write_folder(tmp_path, sound_content())
    write_image(tmp_path / "8.jpg", 64, 64)
    config = make_config(dataset_config, on_broken="refuse")
    with pytest.raises(DataError, match="64x64 pixels, but annotated as 128x160"):
        list(eval_loader(CocoDataset(dataset_config), config))


@pytest.mark.parametrize("annotated_upright", [False, True])
def test_exif_rotation_is_applied_if_annotated_so(tmp_path: Path, annotated_upright: bool) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    write_image(tmp_path / "5.jpg", HEIGHT, WIDTH, exif=exif)
    content = sound_content()
    if annotated_upright:
        entry = next(image for image in content["images"] if image["id"] == 5)
        entry.update(height=WIDTH, width=HEIGHT)
    content["annotations"] = content["annotations"][:1]
    config = make_config(write_folder(tmp_path, content), keep_empty=False, flip_probability=0.0)
    batch = next(iter(train_loader(CocoDataset(config.data.train), config)))
    stored = np.asarray(Image.open(tmp_path / "5.jpg"))
    expected = np.rot90(stored, -1) if annotated_upright else stored
    np.testing.assert_array_equal(batch.images[0].permute(1, 2, 0), expected)


def test_a_killed_worker_is_one_sentence(tmp_path: Path) -> None:
    config = make_config(write_folder(tmp_path, sound_content()), workers=1)
    dataset = CocoDataset(config.data.train)
    for image in tmp_path.glob("*.jpg"):
        image.unlink()
        os.mkfifo(image)  # whoever reads it waits
    batches = train_loader(dataset, config)
    killer = Thread(target=_kill_first_child)
    killer.start()
    with pytest.raises(DataError, match="a process that reads images died"):
        list(batches)
    killer.join()


def _kill_first_child() -> None:
    while not (children := multiprocessing.active_children()):
        time.sleep(0.01)
    time.sleep(0.3)
    children[0].kill()


def test_batch_moves_as_a_whole(synthetic: DatasetConfig) -> None:
    batch = next(iter(train_loader(CocoDataset(synthetic), synthetic_config(synthetic))))
    moved = batch.to("meta")
    assert moved.targets is not None
    tensors = [moved.images, moved.image_sizes, moved.image_ids, moved.source_sizes, moved.seeds]
    assert {t.device.type for t in (*tensors, *moved.targets)} == {"meta"}
