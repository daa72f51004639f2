import gc
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tiny_run import CLASSES, LoadTiny, load_tiny, write_config

from maskrcnn_trt.model.checkpoint import load_checkpoint, save_checkpoint
from maskrcnn_trt.training.config import load_config
from maskrcnn_trt.training.data.coco.dataset import CocoDataset
from maskrcnn_trt.training.data.synthetic.dataset import SyntheticConfig, draw_dataset


@pytest.fixture(autouse=True, scope="module")
def nothing_to_collect() -> None:
    """Collect garbage before tests that fork.

    A forked process crashes if it collects gRPC objects.
    """
    gc.collect()


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configuration file of a training run of a few seconds: narrow model, twelve small images."""
    folder = tmp_path_factory.mktemp("tiny")
    config = SyntheticConfig(train=12, val=5, width=96, height=64, seed=3, classes=CLASSES)
    draw_dataset(folder, config)
    return write_config(folder)


@pytest.fixture(scope="session")
def tiny_checkpoint(
    tiny_checkpoint: Path, tiny_config: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Copy of the checkpoint that all tests share, with the classes of the synthetic images."""
    categories = CocoDataset(load_config(str(tiny_config)).data.train).categories
    path = tmp_path_factory.mktemp("tiny") / "tiny.pth"
    save_checkpoint(path, replace(load_checkpoint(tiny_checkpoint), categories=categories))
    return path


@pytest.fixture
def tiny(tiny_config: Path, tmp_path: Path) -> LoadTiny:
    """Function that loads the tiny run's configuration. The run writes to the test's folder."""
    return partial(load_tiny, tiny_config, tmp_path)
