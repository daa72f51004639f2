"""Checkpoint files, written by training and read by export and evaluation."""

import errno
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import InstanceOf, TypeAdapter, ValidationError
from torch import Tensor

from .atomic_files import atomic_write
from .bundle.manifest import Category, Preprocessing
from .bundle.spec import ShapeBucket
from .config.error_messages import validation_message
from .config.schema import ModelConfig
from .mask_rcnn import MaskRCNN

# Version of the file format.
_FORMAT = 2


class CheckpointError(Exception):
    """A checkpoint or weights file cannot be read, written or used."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Contents of a checkpoint file: weights, configuration, preprocessing and training state."""

    model_config: ModelConfig
    weights: dict[str, InstanceOf[Tensor]]
    categories: tuple[Category, ...]
    preprocessing: Preprocessing
    buckets: tuple[ShapeBucket, ...]
    iteration: int
    metrics: dict[str, float] = field(default_factory=dict)
    training_state: dict[str, Any] = field(default_factory=dict)

    def build_model(self) -> MaskRCNN:
        """Build the model with the checkpoint's weights, in evaluation mode on the CPU."""
        model = MaskRCNN(self.model_config)
        model.load_state_dict(self.weights)
        return model.eval()


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint atomically: a crash leaves the previous file intact.

    Raises:
        CheckpointError: the file cannot be written, for example because the disk is full.
    """
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
    try:
        save_atomically(content, path)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}; make space on the disk, or "
            "choose another folder"
        ) from error


def save_atomically(content: object, path: Path) -> None:
    """Write an object by `torch.save` to a file, which is replaced only if the write succeeds.

    Raises:
        OSError: the file cannot be written, for example because the disk is full.
    """
    try:
        with atomic_write(path) as file:
            torch.save(content, file)
    except RuntimeError as error:
        # After a failed write, torch cannot complete the archive, and raises a RuntimeError whose
        # `__context__` is the OSError.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def unreadable_file_message(path: Path, error: OSError) -> str:
    """Return the message of a `CheckpointError`, given the error raised when reading a file."""
    if error.errno == errno.EINVAL:  # torch seeks to an invalid position in a truncated file
        return f"{path} is damaged; give another file"
    return (
        f"cannot read {path}: {error.strerror or error}; make the file readable for this user, or "
        "give another file"
    )


def load_tensors(path: Path) -> Any:
    """Read a file that `torch.save` wrote, on the CPU and without running code from it.

    Raises:
        CheckpointError: a member of the ZIP file has another checksum than the ZIP file states.
        Exception: of any type, if the file is damaged otherwise, or holds objects that torch's
            `weights_only` forbids.
    """
    # torch itself does not verify checksums, so a damaged weight would go unnoticed. Files of torch
    # before 1.6 have none.
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise CheckpointError(
                    f"{path} is damaged: its ZIP member {damaged} has a wrong checksum; give "
                    "another file, or save it again without "
                    "torch.serialization.set_crc32_options(False)"
                )
    return torch.load(path, map_location="cpu", weights_only=True)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint without running code from it.

    Raises:
        CheckpointError: the file does not exist, is unreadable or damaged, is not a checkpoint, or
            has a checkpoint format or a model setting that this version of the program does not
            support.
    """
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "does not exist"
        raise CheckpointError(f"{path} {kind}; give a .pth file that training wrote")
    try:
        content = load_tensors(path)
        if content["format"] != _FORMAT:
            raise CheckpointError(
                f"{path} has checkpoint format {content['format']}, but this version of the "
                f"program reads format {_FORMAT}; use the version that wrote the checkpoint"
            )
        return TypeAdapter(Checkpoint).validate_python(
            {
                "model_config": _model_config_from(content["model_config"], path),
                "weights": content["model"],
                "categories": content["categories"],
                "preprocessing": content["preprocessing"],
                "buckets": content["buckets"],
                "iteration": content["iteration"],
                "metrics": content["metrics"],
                "training_state": content["training_state"],
            }
        )
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(unreadable_file_message(path, error)) from error
    except Exception as error:
        # A damaged file fails in many ways: zip, pickle, a missing key, a wrong type. torch's
        # message would mislead: it suggests unpickling the file, which may run code.
        reason = f": it lacks {error}" if isinstance(error, KeyError) else ""
        raise CheckpointError(
            f"{path} is damaged or not a checkpoint of this program{reason}; give a .pth file that "
            "training wrote"
        ) from error


def _model_config_from(values: Any, path: Path) -> ModelConfig:
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as error:
        raise CheckpointError(
            f"{path} has a model setting that this version of the program does not support: "
            f"{validation_message(error, ModelConfig)}; use the version that wrote the checkpoint"
        ) from error
