"""Drawn pictures in place of a data set, to measure training where there is none."""

import os
from pathlib import Path

from filelock import FileLock

from ..config import DatasetConfig, TrainConfig
from .synthetic import SyntheticConfig, draw_dataset

_TRAIN_IMAGES, _VAL_IMAGES = 64, 8
_MIN_SIDE = 64


def with_synthetic_data(config: TrainConfig) -> TrainConfig:
    """The configuration with drawn pictures for its training and validation sets.

    They are as large as images become by resizing, and are drawn into a folder of `output_dir`
    unless they are there; of several processes, one draws and the others wait.
    """
    data = config.data
    drawn = SyntheticConfig(
        train=_TRAIN_IMAGES,
        val=_VAL_IMAGES,
        width=max(_MIN_SIDE, data.max_size),
        height=max(_MIN_SIDE, data.min_size),
    )
    folder = config.output_dir / f"synthetic-{drawn.width}x{drawn.height}"
    config.output_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(config.output_dir / ".synthetic.lock"):
        if not folder.exists():
            partial = folder.with_name(f".{folder.name}.partial")
            draw_dataset(partial, drawn, workers=os.cpu_count() or 1)
            partial.rename(folder)
    sets = {"train": _dataset(folder, "train"), "val": data.val and _dataset(folder, "val")}
    return config.model_copy(update={"data": data.model_copy(update=sets)})


def _dataset(folder: Path, split: str) -> DatasetConfig:
    return DatasetConfig(
        images=folder / split, annotations=folder / "annotations" / f"{split}.json"
    )
