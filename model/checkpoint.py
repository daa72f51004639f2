"""Checkpoints: what training writes, and export and evaluation read."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .config import ModelConfig
from .manifest import Category, Preprocessing
from .mask_rcnn import MaskRCNN
from .spec import ShapeBucket

_FORMAT = 2


class CheckpointError(Exception):
    """A file is no checkpoint, or not one that fits."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model, what its input must look like, and the state that training resumes from."""

    model_config: ModelConfig
    weights: dict[str, Tensor]
    categories: tuple[Category, ...]
    preprocessing: Preprocessing
    buckets: tuple[ShapeBucket, ...]
    iteration: int
    metrics: dict[str, float] = field(default_factory=dict)
    training_state: dict[str, Any] = field(default_factory=dict)

    def build_model(self) -> MaskRCNN:
        """The model with these weights, in evaluation mode on the CPU."""
        model = MaskRCNN(self.model_config)
        model.load_state_dict(self.weights)
        return model.eval()


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint whole or not at all: a crash leaves what was there before."""
    content = {
        "format": _FORMAT,
        "model_config": checkpoint.model_config.model_dump(mode="json"),
        "model": checkpoint.weights,
        "categories": [category.model_dump() for category in checkpoint.categories],
        "preprocessing": checkpoint.preprocessing.model_dump(mode="json"),
        "buckets": [list(bucket) for bucket in checkpoint.buckets],
        "iteration": checkpoint.iteration,
        "metrics": checkpoint.metrics,
        "training_state": checkpoint.training_state,
    }
    with whole_file(path) as file:
        torch.save(content, file)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing that takes its name when it is whole, and on the disk for good.

    Until then it is `.NAME.partial`, and what had the name before keeps it.
    """
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    # A name is on the disk when its folder is.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint; nothing in the file can run code.

    Raises:
        CheckpointError: no such file, or its content is not a checkpoint of this version.
    """
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise CheckpointError(f"{path} {kind}; give a .pth file that training wrote")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content["format"] != _FORMAT:
            raise CheckpointError(
                f"{path} has checkpoint format {content['format']}, but this version reads format "
                f"{_FORMAT}; use the version that wrote it"
            )
        return Checkpoint(
            model_config=ModelConfig.model_validate(content["model_config"]),
            weights=content["model"],
            categories=tuple(Category.model_validate(c) for c in content["categories"]),
            preprocessing=Preprocessing.model_validate(content["preprocessing"]),
            buckets=tuple(ShapeBucket(*bucket) for bucket in content["buckets"]),
            iteration=content["iteration"],
            metrics=content["metrics"],
            training_state=content["training_state"],
        )
    except CheckpointError:
        raise
    except Exception as error:
        # A damaged file fails in many ways: zip, pickle, a missing key, a wrong type. What torch
        # says then is no help: to unpickle a strange file would let it run its code.
        raise CheckpointError(
            f"{path} is damaged or no checkpoint of this program; give a .pth file that training "
            "wrote"
        ) from error
