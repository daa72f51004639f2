"""Reading of weights and checkpoints that are given by path, URL or name of a published model."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..bundle.manifest import MANIFEST_NAME
from ..checkpoint import Checkpoint, load_checkpoint
from ..config.reference import text_from_value
from ..download.urls import without_credentials
from ..mask_rcnn import MaskRCNN
from ..plurals import abbreviated
from . import detectron2, torchvision
from .conversion import WeightsConversion, checkpoint_from_weights
from .downloads import CONFIG_NAME
from .files import WeightsError, local_path, read_file
from .origins import Weights
from .recognition import OWN, is_checkpoint, read_weights
from .zoo import ZooModel, is_zoo_name, zoo_model

logger = logging.getLogger(__name__)


def read_reference(reference: str | Path, config: Path | None = None) -> Weights:
    """Read the weights that a reference names. Download them if necessary.

    For a published model, settings that the file may lack are taken from the model's entry in
    `zoo.py`.

    Args:
        reference: path, http(s) URL, name of a published model, or torchvision's name of weights.
        config: detectron2's configuration file of the model. None: for weights of detectron2, use
            `config.yaml` in the folder of the weights if this file exists.

    Raises:
        CheckpointError: the file cannot be read, is a bundle (exported model), or is of an
            unsupported program or model. Or the configuration file cannot be read, or does not
            belong to these weights.
        ZooError: no published model has this name, or this program does not support the model.
        DownloadError: the download failed, or the file has another checksum.
    """
    path = local_path(reference)
    if (path / MANIFEST_NAME).is_file():
        raise WeightsError(
            f"{path} is a bundle and cannot be converted back to weights; give the checkpoint that "
            "the bundle was exported from"
        )
    weights = read_weights(path, config)
    model = _zoo_model_of(reference)
    if model is None:
        return weights
    sizes = {f"preprocessing.{k}": getattr(model, k) for k in ("min_size", "max_size")}
    return replace(weights, assumed=weights.assumed | sizes | dict(model.settings))


def convert_reference(
    reference: str | Path,
    overrides: Sequence[str] = (),
    categories: Path | None = None,
    *,
    other_channel_order: bool = False,
    config: Path | None = None,
) -> WeightsConversion:
    """Convert weights, given by a reference, to a checkpoint that gives the same results.

    The checkpoint of a published model has the classes and the test-time image size of that model.
    For other weights, a warning names assumed settings that may be wrong.

    Args:
        reference: path, http(s) URL, name of a published model, or torchvision's name of weights.
        overrides: settings of `ConversionConfig` in the form `key.path=value`. They take precedence
            over all settings of the weights.
        categories: COCO annotation file that names the classes. None: use the classes of the
            published model, or else `default_categories`.
        other_channel_order: whether the network takes RGB although the program that wrote the
            weights usually takes BGR, or the reverse.
        config: detectron2's configuration file of the model. None: for weights of detectron2, use
            `config.yaml` in the folder of the weights if this file exists.

    Raises:
        CheckpointError: the file cannot be read or converted, is a checkpoint of this program, or
            has NaN or infinite weights.
        ZooError: no published model has this name, or this program does not support the model.
        DownloadError: the download failed, or the file has another checksum.
    """
    weights = read_reference(reference, config)
    name = without_credentials(reference)
    if weights.origin == OWN:
        raise WeightsError(f"{name} is already a checkpoint of this program; no conversion needed")
    try:
        conversion = checkpoint_from_weights(
            weights, overrides, categories, other_channel_order=other_channel_order
        )
    except WeightsError as error:
        raise WeightsError(f"{name}: {error}") from None
    check_finite(name, conversion.checkpoint.weights)
    model = _zoo_model_of(reference)
    if model is None:
        given = {override.partition("=")[0] for override in overrides}
        _warn_of_assumptions(name, weights, conversion, given)
        return conversion
    checkpoint = conversion.checkpoint
    classes = None if categories else model.categories
    checkpoint = replace(checkpoint, categories=classes or checkpoint.categories)
    return replace(conversion, checkpoint=checkpoint)


def _warn_of_assumptions(
    name: str, weights: Weights, conversion: WeightsConversion, given: set[str]
) -> None:
    assumed = {key: value for key, value in conversion.assumed.items() if key not in given}
    classes = weights.structure["num_classes"]
    eps = assumed.get("backbone.norm_eps")
    frozen = weights.structure["backbone.norm"] == "frozen_bn"
    if weights.origin == torchvision.ORIGIN.name and frozen and eps and classes != 90:
        logger.warning(
            "%s has %d classes instead of COCO's 90 and does not hold the epsilon of its batch "
            "norms; assumed backbone.norm_eps=%g. This epsilon fits a training that started from a "
            "pretrained backbone. If the model was fine-tuned from torchvision's COCO_V1 weights, "
            "set backbone.norm_eps=0",
            name, classes, eps,
        )  # fmt: skip
    if weights.origin == detectron2.ORIGIN.name and "preprocessing.min_size" in assumed:
        logger.warning(
            "%s does not hold the model's settings; assumed %s. Give the model's %s (with "
            "--config, or in the folder of the weights), or set differing values with KEY=VALUE",
            name,
            ", ".join(f"{key}={text_from_value(value)}" for key, value in assumed.items()),
            CONFIG_NAME,
        )


def checkpoint_from_reference(reference: str | Path) -> Checkpoint:
    """Read a checkpoint, or convert another implementation's weights. Download them if necessary.

    Args:
        reference: path, http(s) URL, name of a published model, or torchvision's name of weights.

    Raises:
        CheckpointError: the file cannot be read or converted, or has NaN or infinite weights.
        ZooError: no published model has this name, or this program does not support the model.
        DownloadError: the download failed, or the file has another checksum.
    """
    path = local_path(reference)
    if path.is_file() and is_checkpoint(read_file(path)):
        checkpoint = load_checkpoint(path)
        name = without_credentials(reference)
        _check_names_and_shapes(name, checkpoint)
        check_finite(name, checkpoint.weights)
        return checkpoint
    return convert_reference(reference).checkpoint


def _check_names_and_shapes(name: str, checkpoint: Checkpoint) -> None:
    with torch.device("meta"):  # allocates no memory
        expected = MaskRCNN(checkpoint.model_config).state_dict()
    needed, actual = (
        {key: tensor.shape for key, tensor in tensors.items()}
        for tensors in (expected, checkpoint.weights)
    )
    wrong = sorted({key for key, _ in needed.items() ^ actual.items()})
    if wrong:
        raise WeightsError(
            f"the tensors in {name} do not fit the configuration in the same file (missing, "
            f"superfluous or of another shape: {abbreviated(wrong)}); give a .pth file that "
            "training wrote"
        )


def check_finite(source: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Check that no weight is NaN or infinite. With such weights, a model detects nothing.

    Args:
        source: file, URL or name of the weights, for the error message.
        tensors: weights by name.

    Raises:
        CheckpointError: a weight is NaN or infinite.
    """
    for key, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise WeightsError(
                f"{without_credentials(source)}: tensor {key} has NaN or infinite values, as after "
                "a training that diverged; give an earlier checkpoint, or train again with a lower "
                "learning rate"
            )


def _zoo_model_of(reference: str | Path) -> ZooModel | None:
    return zoo_model(str(reference)) if is_zoo_name(reference) else None
