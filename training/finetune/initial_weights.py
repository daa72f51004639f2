"""Load the initial model of a fine-tuning from the weights that the key `weights` names."""

import torch

from ...model.bundle.manifest import Preprocessing
from ...model.bundle.spec import ShapeBucket
from ...model.checkpoint import Checkpoint
from ...model.config.schema import BackboneConfig, ModelConfig
from ...model.download.local_files import DownloadError
from ...model.mask_rcnn import MaskRCNN
from ...model.weights.conversion import config_from_settings
from ...model.weights.references import checkpoint_from_reference, read_reference

# Weights of a Mask R-CNN trained on COCO.
DEFAULT_WEIGHTS = "torchvision:maskrcnn_resnet50_fpn_v2"
_MIN_SIZE, _MAX_SIZE = 800, 1333


def initial_checkpoint(reference: str | None) -> Checkpoint:
    """Return the model and preprocessing from which a fine-tuning starts.

    The result depends on `reference`:

    - Weights of a whole model: the result has these weights.
    - Weights of a backbone only: settings of the model that the weights do not determine have their
      defaults.
    - None: the model is the default model with group norm.

    In the last two cases, the input size is the default, and the weights in the result are tensors
    without data (device `meta`).

    Args:
        reference: Value of the configuration key `weights`. None: random weights.

    Raises:
        CheckpointError: The weights cannot be read or converted.
        ZooError: The published model in `reference` does not exist, or is not supported.
        DownloadError: The download failed, or the downloaded file has a wrong checksum.
    """
    if reference is None:
        backbone = BackboneConfig(norm="gn", frozen_stages=0, fpn_norm="gn")
        return _with_defaults(ModelConfig(backbone=backbone))
    try:
        weights = read_reference(reference)
    except DownloadError as error:
        raise DownloadError(
            f"{error}; or start from other weights with weights=FILE, or from random weights with "
            "weights=null"
        ) from None
    if weights.has_heads:
        return checkpoint_from_reference(reference)
    return _with_defaults(config_from_settings(weights.settings).model)


def _with_defaults(config: ModelConfig) -> Checkpoint:
    # Only the shapes of these weights are used.
    with torch.device("meta"):
        weights = MaskRCNN(config).state_dict()
    return Checkpoint(
        model_config=config,
        weights=weights,
        categories=(),
        preprocessing=Preprocessing(
            min_size=_MIN_SIZE,
            max_size=_MAX_SIZE,
            pixel_mean=config.pixel_mean,
            pixel_std=config.pixel_std,
        ),
        buckets=(ShapeBucket(800, 1344), ShapeBucket(1344, 800)),
        iteration=0,
    )
