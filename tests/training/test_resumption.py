import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import assert_equal, largest_difference, load_tiny, train

from maskrcnn_trt.model.checkpoint import load_checkpoint, save_checkpoint
from maskrcnn_trt.training.config import ConfigError, TrainConfig
from maskrcnn_trt.training.data.coco import CocoDataset
from maskrcnn_trt.training.data.loader import train_loader
from maskrcnn_trt.training.distributed import Worker
from maskrcnn_trt.training.random_state import seed_generators
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
    ("override", "sentence"),
    [
        ("model.roi.box_head_dim=64", "has model.roi.box_head_dim=32, not 64; give the same"),
        ("seed=1", "has seed=0, not 1; give the same"),
        ("solver.images_per_batch=2", "has solver.images_per_batch=4, not 2"),
        ("solver.optimizer=adamw", "has solver.optimizer=sgd, not adamw"),
        ("data.flip_probability=0", "has data.flip_probability=0.5, not 0.0"),
    ],
)
def test_what_decides_the_steps_must_stay(
    tiny_config: Path, folder: Path, override: str, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        train(load_tiny(tiny_config, folder, override), resume=True)


def test_all_else_may_change(tiny_config: Path, folder: Path) -> None:
    """It applies from the resumed iteration on, and the log names it."""
    config = load_tiny(
        tiny_config, folder, "solver.max_iterations=2", "solver.base_lr=0.5", "log_period=1",
        "solver.momentum=0.5", "solver.warmup_iterations=0", "data.val=null", "data.workers=1",
        "solver.accumulate=2", "checkpoint_period=7", "weights=gone.pth",
    )  # fmt: skip
    checkpoint = train(config, resume=True)
    assert checkpoint.iteration == 2
    group = checkpoint.training_state["optimizer"]["param_groups"][0]
    assert (group["lr"], group["momentum"]) == (0.5, 0.5)
    log = (folder / "log.txt").read_text()
    assert "resuming with solver.base_lr=0.5, which was 0.01" in log
    assert "resuming with solver.max_iterations=2, which was 1" in log
    assert "output_dir" not in log


def _moved_data(tiny_config: Path, tmp_path: Path) -> tuple[Path, list[str]]:
    data = Path(shutil.copytree(tiny_config.parent, tmp_path / "data"))
    annotations = data / "annotations/train.json"
    return annotations, [
        f"data.train={{images: {data / 'train'}, annotations: {annotations}}}",
        "solver.max_iterations=2",
    ]


def test_data_may_be_moved(tiny_config: Path, folder: Path, tmp_path: Path) -> None:
    _, overrides = _moved_data(tiny_config, tmp_path)
    assert train(load_tiny(tiny_config, folder, *overrides), resume=True).iteration == 2


def _rename(content: dict[str, Any]) -> None:
    for entry in (*content["images"], *content["annotations"]):
        entry["id" if "file_name" in entry else "image_id"] += 100


@pytest.mark.parametrize(
    ("change", "subject"),
    [
        (lambda content: content["images"].pop(), "number of images"),
        (_rename, "ids of the images"),
        (lambda content: content["annotations"].pop(), "annotation file"),
    ],
)
def test_changed_data_is_refused(
    tiny_config: Path, folder: Path, tmp_path: Path, change: Any, subject: str
) -> None:
    annotations, overrides = _moved_data(tiny_config, tmp_path)
    content = json.loads(annotations.read_text())
    change(content)
    annotations.write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        train(load_tiny(tiny_config, folder, *overrides), resume=True)
    assert str(caught.value) == (
        f"the {subject} of {annotations} has changed since the run began; restore the data, or "
        "start another run from the checkpoint with weights=FILE output_dir=FOLDER"
    )


def _written_by(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Let the run be one of another version, whose configuration had other keys."""
    path = folder / "model_final.pth"
    checkpoint = load_checkpoint(path)
    change(checkpoint.training_state["identity"]["config"])
    save_checkpoint(path, checkpoint)


def test_keys_younger_than_the_run_have_their_defaults(tiny_config: Path, folder: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        del config["model"]["mask_paste"], config["data"]["keep_empty"], config["keep_checkpoints"]

    _written_by(folder, change)
    config = load_tiny(tiny_config, folder, "solver.max_iterations=2")
    assert train(config, resume=True).iteration == 2
    assert "keep_checkpoints" not in (folder / "log.txt").read_text()


def test_keys_that_are_no_more_are_named(tiny_config: Path, folder: Path) -> None:
    _written_by(folder, lambda config: config["data"].update(crop=0.5))
    with pytest.raises(ConfigError, match=r"of another version .*: unknown key data\.crop"):
        train(load_tiny(tiny_config, folder), resume=True)


def test_weights_alone_are_not_resumed(
    tiny_config: Path, folder: Path, tiny_checkpoint: Path
) -> None:
    save_checkpoint(folder / "model_final.pth", load_checkpoint(tiny_checkpoint))
    with pytest.raises(ConfigError, match="has weights but no state of a run; start another"):
        train(load_tiny(tiny_config, folder), resume=True)


def _drawn(config: TrainConfig, path: Path) -> tuple[list[float], Trainer]:
    trainer = Trainer(config, ALONE)
    trainer.load_state(load_checkpoint(path))
    return torch.randn(3).tolist(), trainer


def test_generators_go_on_where_they_were(tiny_config: Path, folder: Path, tmp_path: Path) -> None:
    """As layers of a user's own would need it: one that draws, in every step."""
    config = load_tiny(tiny_config, tmp_path, "model.num_classes=3")
    path = folder / "model_final.pth"
    seed_generators(5)
    first, trainer = _drawn(config, path)
    seed_generators(6)
    second, _ = _drawn(config, path)
    assert first == second
    batch = next(iter(train_loader(CocoDataset(config.data.train), config)))
    trainer.step([batch])
    state = trainer.state()
    assert len(state["generators"]) == 1
    assert torch.equal(state["generators"][0]["torch"], torch.get_rng_state())


def test_another_number_of_processes_is_said(
    tiny_config: Path, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "model_final.pth"
    checkpoint = load_checkpoint(path)
    checkpoint.training_state["generators"] *= 2
    save_checkpoint(path, checkpoint)
    with caplog.at_level(logging.WARNING):
        drawn, _ = _drawn(load_tiny(tiny_config, tmp_path, "model.num_classes=3"), path)
    assert "the run to resume had 2 processes, this one has 1: the random generators" in caplog.text
    assert len(drawn) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_loss_scale_and_gpu_generator_are_resumed(tiny_config: Path, tmp_path: Path) -> None:
    """Weights only nearly: sums of gradients on a GPU come in no fixed order."""
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
