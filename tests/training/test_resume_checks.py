import json
import logging
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import assert_equal, largest_difference, load_tiny, train

from maskrcnn_trt.model.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from maskrcnn_trt.training.config import ConfigError, load_config
from maskrcnn_trt.training.data.coco.dataset import CocoDataset
from maskrcnn_trt.training.data.loading.loader import train_loader
from maskrcnn_trt.training.distributed import Worker
from maskrcnn_trt.training.random_state import generator_states, seed_generators
from maskrcnn_trt.training.trainer import Trainer

ALONE = Worker(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def begun(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run of one iteration."""
    folder = tmp_path_factory.mktemp("begun")
    train(load_tiny(tiny_config, folder, "solver.max_iterations=1"))
    return folder


@pytest.fixture
def folder(begun: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(begun, tmp_path / "run"))


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        (
            "model.roi.box_head_dim=64",
            "model.roi.box_head_dim=32, but the configuration now has model.roi.box_head_dim=64",
        ),
        ("seed=1", "seed=0, but the configuration now has seed=1"),
        (
            "solver.images_per_batch=2",
            "the configuration now has solver.images_per_batch=2; set solver.images_per_batch=4",
        ),
        (
            "solver.optimizer=adamw",
            "the configuration now has solver.optimizer=adamw; set solver.optimizer=sgd",
        ),
        (
            "data.keep_empty=true",
            "the configuration now has data.keep_empty=true; set data.keep_empty=false",
        ),
        (
            "data.repeat_threshold=0.5",
            "data.repeat_threshold=null, but the configuration now has data.repeat_threshold=0.5",
        ),
    ],
)
def test_model_data_seed_and_batch_size_must_be_unchanged(
    tiny_config: Path, folder: Path, override: str, difference: str
) -> None:
    with pytest.raises(ConfigError, match=difference):
        train(load_tiny(tiny_config, folder, override), resume=True)


def test_other_keys_may_change(tiny_config: Path, folder: Path) -> None:
    """Changes are logged, and apply to all later iterations. `weights` is ignored."""
    config = load_tiny(
        tiny_config, folder, "solver.max_iterations=2", "solver.base_lr=0.5", "log_period=1",
        "solver.momentum=0.5", "solver.warmup_iterations=0", "data.val=null", "data.workers=1",
        "solver.accumulate=2", "checkpoint_period=7", "weights=gone.pth",
        "data.flip_probability=0", "data.transforms=[{name: ColorJitter}]",
    )  # fmt: skip
    checkpoint = train(config, resume=True)
    assert checkpoint.iteration == 2
    group = checkpoint.training_state["optimizer"]["param_groups"][0]
    assert (group["lr"], group["momentum"]) == (0.5, 0.5)
    log = (folder / "log.txt").read_text()
    assert "solver.base_lr=0.5, previously 0.01" in log
    assert "solver.max_iterations=2, previously 1" in log
    assert "weights=gone.pth is ignored" in log
    assert load_config(str(folder / "config.yaml")).weights is None


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_memory_order_may_change(tiny_config: Path, tmp_path: Path, optimizer: str) -> None:
    settings = (f"solver.optimizer={optimizer}", "solver.base_lr=0.001")
    begun = train(load_tiny(tiny_config, tmp_path / "0", *settings, "solver.max_iterations=1"))
    same, other = (
        train(
            load_tiny(tiny_config, folder, *settings, "solver.max_iterations=2", change),
            resume=True,
        )
        for change in ("channels_last=false", "channels_last=true")
        for folder in [Path(shutil.copytree(tmp_path / "0", tmp_path / change))]
    )
    step, difference = (_distance(same, end) for end in (begun, other))
    assert difference < 0.1 * step


def _distance(first: Checkpoint, second: Checkpoint) -> float:
    pairs = zip(first.weights.values(), second.weights.values(), strict=True)
    return math.sqrt(sum(float((a - b).double().square().sum()) for a, b in pairs))


def test_a_frozen_backbone_may_be_trained_again(tiny_config: Path, tmp_path: Path) -> None:
    frozen, trained = (
        train(load_tiny(tiny_config, tmp_path, *settings), resume=len(settings) == 1)
        for settings in (
            ("solver.max_iterations=1", "solver.freeze_backbone_after_epoch=0"),
            ("solver.max_iterations=2",),
        )
    )
    name = "backbone.body.layer4.0.conv1.weight"
    assert not torch.equal(trained.weights[name], frozen.weights[name])


def _rename(content: dict[str, Any]) -> None:
    for entry in (*content["images"], *content["annotations"]):
        entry["id" if "file_name" in entry else "image_id"] += 100


@pytest.mark.parametrize(
    ("change", "subject"),
    [(None, ""), (lambda content: content["images"].pop(), "number of images"),
     (_rename, "ids of the images"),
     (lambda content: content["annotations"].pop(), "annotation file"),
     (lambda content: content["categories"].append({"id": 9, "name": "new"}), "annotation file")],
    ids=["moved", "an image less", "renamed", "an annotation less", "a class more"],
)  # fmt: skip
def test_data_may_be_moved_but_not_changed(
    tiny_config: Path, folder: Path, tmp_path: Path, change: Any, subject: str
) -> None:
    data = Path(shutil.copytree(tiny_config.parent, tmp_path / "data"))
    annotations = data / "annotations/train.json"
    moved = f"data.train={{images: {data / 'train'}, annotations: {annotations}}}"
    config = load_tiny(tiny_config, folder, moved, "solver.max_iterations=2")
    if change is None:
        assert train(config, resume=True).iteration == 2
        return
    content = json.loads(annotations.read_text())
    change(content)
    annotations.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"train.json.*{subject}.* weights=FILE"):
        train(config, resume=True)


def _change_stored_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the stored configuration of a run, as if another version had created the run."""
    path = folder / "model_final.pth"
    checkpoint = load_checkpoint(path)
    change(checkpoint.training_state["identity"]["config"])
    save_checkpoint(path, checkpoint)


def test_keys_newer_than_the_run_have_their_defaults(tiny_config: Path, folder: Path) -> None:
    """Keys that were removed since are an error."""

    def change(config: dict[str, Any]) -> None:
        del config["model"]["mask_paste"], config["data"]["keep_empty"], config["keep_checkpoints"]

    _change_stored_config(folder, change)
    config = load_tiny(tiny_config, folder, "solver.max_iterations=2")
    assert train(config, resume=True).iteration == 2
    assert "keep_checkpoints" not in (folder / "log.txt").read_text()
    _change_stored_config(folder, lambda config: config["data"].update(crop=0.5))
    with pytest.raises(ConfigError, match=r"another version .* data\.crop"):
        train(config, resume=True)


def test_weights_alone_are_not_resumed(
    tiny_config: Path, folder: Path, tiny_checkpoint: Path
) -> None:
    save_checkpoint(folder / "model_final.pth", load_checkpoint(tiny_checkpoint))
    with pytest.raises(ConfigError, match=r"no training state; .*weights=FILE"):
        train(load_tiny(tiny_config, folder), resume=True)


def _draw() -> list[float]:
    return [random.random(), np.random.random(), float(torch.randn(1))]


def test_generators_are_restored(
    tiny_config: Path, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers of a user's own may draw random numbers. Another number of processes is logged."""
    path = folder / "model_final.pth"
    checkpoint = load_checkpoint(path)
    seed_generators(5)
    checkpoint.training_state["generators"] = [generator_states(ALONE.device)]
    expected = _draw()
    save_checkpoint(path, checkpoint)
    config = load_tiny(tiny_config, tmp_path, "model.num_classes=3")
    trainer = Trainer(config, ALONE)
    trainer.load_state(load_checkpoint(path))
    assert _draw() == expected
    batch = next(iter(train_loader(CocoDataset(config.data.train), config)))
    trainer.step([batch])
    state = trainer.state()
    assert len(state["generators"]) == 1
    assert torch.equal(state["generators"][0]["torch"], torch.get_rng_state())

    checkpoint.training_state["generators"] *= 2
    with caplog.at_level(logging.WARNING):
        trainer.load_state(checkpoint)
    assert "2 processes and is resumed with 1" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_loss_scale_and_gpu_generator_are_resumed(tiny_config: Path, tmp_path: Path) -> None:
    """Weights are compared with a tolerance, because gradient sums on a GPU have no fixed order."""
    settings = ("device=cuda", "precision=fp16", "evaluation={period: 2}")
    whole = train(load_tiny(tiny_config, tmp_path / "whole", *settings))
    for end in (2, 4):
        config = load_tiny(tiny_config, tmp_path / "cut", *settings, f"solver.max_iterations={end}")
        resumed = train(config, resume=end == 4)
    assert resumed.training_state["scaler"]["_growth_tracker"] > 0
    for name in ("scaler", "generators"):
        assert_equal(resumed.training_state[name], whole.training_state[name])
    assert "cuda" in resumed.training_state["generators"][0]
    assert largest_difference(resumed.weights, whole.weights) < 1e-2
