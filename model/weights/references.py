"""Weights and checkpoints of model references: paths, URLs and names of published models."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..bundle.manifest import MANIFEST_NAME
from ..bundle.spec import ShapeBucket
from ..checkpoint import Checkpoint, load_checkpoint
from .conversion import WeightsConversion, checkpoint_from_weights
from .files import WeightsError, local_path, read_file
from .origins import Weights
from .recognition import OWN, is_checkpoint, read_weights
from .zoo import ZooModel, is_zoo_name, zoo_model

# Input sizes are multiples of this number of pixels.
_BUCKET_STEP = 32


def read_reference(reference: str | Path) -> Weights:
    """Read the weights of a reference; see `local_path` for its forms.

    Settings that a published model's file may lack are those of its configuration.

    Raises:
        CheckpointError: the file cannot be read, or its origin or model is unknown.
        ZooError: the zoo does not have the model, or this program cannot compute it.
        DownloadError: the download failed, or the file has another checksum.
    """
    path = local_path(reference)
    if (path / MANIFEST_NAME).is_file():
        raise WeightsError(
            f"{path} is a bundle, which cannot be converted back to weights; give the checkpoint "
            "that it was exported from"
        )
    weights = read_weights(path)
    model = _zoo_model_of(reference)
    if model is None:
        return weights
    return replace(weights, assumed=weights.assumed | dict(model.settings))


def convert_reference(
    reference: str | Path,
    overrides: Sequence[str] = (),
    categories: Path | None = None,
    *,
    other_channel_order: bool = False,
) -> WeightsConversion:
    """Convert the weights of a reference; see `checkpoint_from_weights` for the arguments.

    A published model gets its own classes and test size.

    Raises:
        CheckpointError: the file cannot be read or converted, or is a checkpoint of this program.
        ZooError: the zoo does not have the model, or this program cannot compute it.
        DownloadError: the download failed, or the file has another checksum.
    """
    weights = read_reference(reference)
    if weights.origin == OWN:
        raise WeightsError(
            f"{reference} is already a checkpoint of this program; no conversion needed"
        )
    try:
        conversion = checkpoint_from_weights(
            weights, overrides, categories, other_channel_order=other_channel_order
        )
    except WeightsError as error:
        raise WeightsError(f"{reference}: {error}") from None
    model = _zoo_model_of(reference)
    if model is None:
        return conversion
    checkpoint = conversion.checkpoint
    classes = None if categories else model.categories
    checkpoint = replace(
        checkpoint,
        categories=classes or checkpoint.categories,
        preprocessing=checkpoint.preprocessing.model_copy(
            update={"min_size": model.min_size, "max_size": model.max_size}
        ),
        buckets=_buckets(model),
    )
    return replace(conversion, checkpoint=checkpoint)


def checkpoint_from_reference(reference: str | Path) -> Checkpoint:
    """Return the checkpoint of a reference, converted from another implementation if necessary.

    Raises:
        CheckpointError: the file cannot be read or converted.
        ZooError: the zoo does not have the model, or this program cannot compute it.
        DownloadError: the download failed, or the file has another checksum.
    """
    path = local_path(reference)
    if path.is_file() and is_checkpoint(read_file(path)):
        return load_checkpoint(path)
    return convert_reference(reference).checkpoint


def _zoo_model_of(reference: str | Path) -> ZooModel | None:
    return zoo_model(str(reference)) if is_zoo_name(reference) else None


def _buckets(model: ZooModel) -> tuple[ShapeBucket, ShapeBucket]:
    """Return the landscape and the portrait input size of a published model."""
    shorter, longer = (
        math.ceil(size / _BUCKET_STEP) * _BUCKET_STEP for size in (model.min_size, model.max_size)
    )
    return ShapeBucket(shorter, longer), ShapeBucket(longer, shorter)
