import logging
import multiprocessing
import os
import stat
import sys
import time
from pathlib import Path
from threading import Thread

import pytest
import torch
from coco_folder import make_config, synthetic_config, valid_content, write_folder

from maskrcnn_trt.training.config import DatasetConfig
from maskrcnn_trt.training.data.coco.dataset import CocoDataset, DataError
from maskrcnn_trt.training.data.loading.batches import Batch
from maskrcnn_trt.training.data.loading.loader import (
    eval_loader,
    initialise_worker,
    train_loader,
)

# Python 3.12 warns if a process with threads forks. Workers start before threads hold any lock.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def assert_equal(first: Batch, second: Batch) -> None:
    for name in ("images", "image_sizes", "image_ids", "source_sizes", "seeds"):
        torch.testing.assert_close(getattr(first, name), getattr(second, name), rtol=0, atol=0)
    assert first.targets is not None
    assert second.targets is not None
    for ours, theirs in zip(first.targets, second.targets, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_workers_change_nothing(synthetic: DatasetConfig) -> None:
    dataset = CocoDataset(synthetic)
    alone = train_loader(dataset, synthetic_config(synthetic, workers=0))
    helped = train_loader(dataset, synthetic_config(synthetic, workers=2))
    assert len(alone) == len(helped) == 6
    for first, second in zip(alone, helped, strict=True):
        assert_equal(first, second)


def _end_threads_by_errors() -> None:
    initialise_worker(0)
    for error in (ConnectionResetError("hidden"), EOFError("hidden"), ValueError("shown")):
        sys.excepthook(type(error), error, None)


def test_workers_print_no_traceback_if_the_main_process_ends(
    capfd: pytest.CaptureFixture[str],
) -> None:
    process = multiprocessing.get_context("fork").Process(target=_end_threads_by_errors)
    process.start()
    process.join()
    errors = capfd.readouterr().err
    assert "shown" in errors
    assert "hidden" not in errors


def test_a_resumed_loader_continues_the_sequence(synthetic: DatasetConfig) -> None:
    dataset = CocoDataset(synthetic)
    config = synthetic_config(synthetic, max_iterations=9, accumulate=2)
    state = torch.get_rng_state()
    whole = list(train_loader(dataset, config))
    resumed = list(train_loader(dataset, config, first_iteration=4))
    for first, second in zip(whole[8:], resumed, strict=True):
        assert_equal(first, second)
    torch.testing.assert_close(torch.get_rng_state(), state)


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (1, 2), (2, 2)])
def test_images_do_not_depend_on_ranks_and_accumulation(
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
    moved = batches[0].to("meta")
    assert moved.targets is not None
    tensors = [moved.images, moved.image_sizes, moved.image_ids, moved.source_sizes, moved.seeds]
    assert {t.device.type for t in (*tensors, *moved.targets)} == {"meta"}


def test_evaluation_reads_every_image_once(tmp_path: Path) -> None:
    config = make_config(write_folder(tmp_path, valid_content()))
    dataset = CocoDataset(config.data.train)
    ranks = [eval_loader(dataset, config, rank=rank, world_size=2) for rank in range(2)]
    assert [len(loader) for loader in ranks] == [1, 1]
    batches = [batch for loader in ranks for batch in loader]
    assert sorted(i for b in batches for i in b.image_ids.tolist()) == [2, 5, 8, 9, 11]
    assert all(batch.targets is None for batch in batches)
    assert all(batch.images.shape[0] == len(batch.source_sizes) for batch in batches)


def test_batch_size_must_divide(synthetic: DatasetConfig) -> None:
    with pytest.raises(DataError, match=r"images_per_batch 4 .* 3 ranks"):
        train_loader(CocoDataset(synthetic), synthetic_config(synthetic), world_size=3)


BROKEN = {
    "truncated": lambda data: data[: len(data) // 2],
    "text": lambda data: b"not an image",
    "empty": lambda data: b"",
}


@pytest.mark.parametrize(
    ("kind", "workers"), [("truncated", 0), ("text", 0), ("empty", 0), ("text", 1)]
)
def test_broken_files_are_replaced_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, workers: int
) -> None:
    dataset_config = write_folder(tmp_path, valid_content())
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
    assert all("8.jpg: " in w and "(skipped files so far: 1)" in w for w in warnings)


@pytest.mark.parametrize("workers", [0, 1])
def test_broken_files_are_refused(tmp_path: Path, workers: int) -> None:
    dataset_config = write_folder(tmp_path, valid_content())
    (tmp_path / "8.jpg").write_bytes(b"no image")
    config = make_config(dataset_config, workers=workers, on_broken="refuse")
    for loader in (train_loader, eval_loader):
        with pytest.raises(DataError, match=r"^[^\n]*8\.jpg: [^\n]*data.on_broken=skip[^\n]*$"):
            list(loader(CocoDataset(dataset_config), config))


def test_replacements_may_be_broken_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(write_folder(tmp_path, valid_content()))
    for name in ("8.jpg", "9.jpg"):
        (tmp_path / name).write_bytes(b"no image")
    batches = list(train_loader(CocoDataset(config.data.train), config))
    landscape = next(b for b in batches if b.images.shape[2] == 128)
    assert sorted(landscape.image_ids.tolist()) == [5, 11, 11, 11]
    assert "skipped files so far: 2" in caplog.text


def test_a_killed_worker_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stat, "S_ISREG", bool)  # pipes pass as files
    config = make_config(write_folder(tmp_path, valid_content()), workers=1)
    dataset = CocoDataset(config.data.train)
    for image in tmp_path.glob("*.jpg"):
        image.unlink()
        os.mkfifo(image)  # reading it blocks
    batches = train_loader(dataset, config)
    killer = Thread(target=_kill_first_child)
    killer.start()
    with pytest.raises(DataError, match=r"worker died.*data\.workers"):
        list(batches)
    killer.join()


def test_a_killed_worker_is_noticed_only_when_the_next_batch_is_due(tmp_path: Path) -> None:
    """torch's handler would raise the error in the middle of a training step."""
    config = make_config(write_folder(tmp_path, valid_content()), workers=1)
    batches = iter(train_loader(CocoDataset(config.data.train), config))
    next(batches)
    _kill_first_child()
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:  # a step
        sum(range(1000))
    with pytest.raises(DataError, match="worker died"):
        list(batches)


def _kill_first_child() -> None:

    while not (children := multiprocessing.active_children()):
        time.sleep(0.01)

    time.sleep(0.3)
    children[0].kill()
