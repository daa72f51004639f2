"""From weights of another implementation to a checkpoint of ours, whole or not at all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from ..checkpoint import Checkpoint
from ..config import ModelConfig
from ..config_faults import sentence_from_fault
from ..manifest import Preprocessing
from ..mask_rcnn import MaskRCNN
from ..overrides import OverrideError, value_at, with_overrides, with_value
from ..spec import ShapeBucket
from .categories import default_categories, read_categories
from .files import WeightsError
from .layouts import reverse_channels
from .origins import Settings, Weights, listed

_BUCKETS = (ShapeBucket(800, 1344), ShapeBucket(1344, 800))
_COUNTER = "num_batches_tracked"


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A checkpoint, and what became of the file it was made from."""

    checkpoint: Checkpoint
    origin: str
    taken: int
    """Tensors of the model that the file has."""
    left_over: tuple[str, ...]
    """Names in the file that detections do not depend on."""
    assumed: Settings
    """What the file does not say, as it is in the checkpoint."""


def checkpoint_from_weights(
    weights: Weights,
    overrides: Sequence[str] = (),
    categories: Path | None = None,
    *,
    other_channel_order: bool = False,
) -> Conversion:
    """A checkpoint that computes what the weights' origin computed with them.

    Args:
        weights: as read.
        overrides: `key.path=value` settings of `ModelConfig` that replace what is assumed.
        categories: COCO annotation file that names the classes; none, COCO's own names.
        other_channel_order: the network took RGB although its origin usually takes BGR, or the
            reverse.

    Raises:
        WeightsError: the weights are of a backbone only, or do not fit the configuration.
    """
    if not weights.has_heads:
        raise WeightsError(
            f"it is a {weights.structure['backbone.name']} of {weights.origin} without the heads "
            "of a detector; start a training from it with `maskrcnn train CONFIG weights=FILE`"
        )
    config = config_from_settings(weights.settings, overrides)
    tensors = reverse_channels(weights.tensors) if other_channel_order else weights.tensors
    expected = expected_tensors(config)
    check_fit(tensors, expected)
    return Conversion(
        checkpoint=Checkpoint(
            model_config=config,
            weights={name: tensors.get(name, torch.tensor(0)) for name in expected},
            categories=(
                read_categories(categories, config.num_classes)
                if categories
                else default_categories(config.num_classes)
            ),
            preprocessing=Preprocessing(
                min_size=800,
                max_size=1333,
                pixel_mean=config.pixel_mean,
                pixel_std=config.pixel_std,
            ),
            buckets=_BUCKETS,
            iteration=0,
        ),
        origin=weights.origin,
        taken=len(expected.keys() & tensors.keys()),
        left_over=weights.left_over,
        assumed={key: value_at(config, key) for key in weights.assumed},
    )


def config_from_settings(settings: Settings, overrides: Sequence[str] = ()) -> ModelConfig:
    """Configuration with dotted settings, and then overrides, applied to the defaults.

    Raises:
        WeightsError: a key or value is not allowed.
    """
    values: dict[str, object] = {}
    for key, value in settings.items():
        values = with_value(values, key, value)
    try:
        return ModelConfig.model_validate(with_overrides(values, overrides))
    except OverrideError as error:
        raise WeightsError(str(error)) from None
    except ValidationError as error:
        raise WeightsError(sentence_from_fault(error, ModelConfig)) from None


def expected_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """State of a model, without memory for it."""
    with torch.device("meta"):
        return dict(MaskRCNN(config).state_dict())


def check_fit(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Make sure that tensors are all that a model needs, and nothing else.

    Raises:
        WeightsError: one is missing, superfluous or of another shape.
    """
    missing = [n for n in expected if n not in tensors and not n.endswith(_COUNTER)]
    if missing:
        raise WeightsError(f"it lacks {listed(missing)}; the file is not of a whole Mask R-CNN")
    surplus = [n for n in tensors if n not in expected and not n.endswith(_COUNTER)]
    if surplus:
        raise WeightsError(f"it has {listed(surplus)} besides, which this model has no place for")
    check_shapes(tensors, expected)


def check_shapes(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Make sure that tensors have the shapes that a model has under the same names.

    Raises:
        WeightsError: one has not.
    """
    for name, tensor in expected.items():
        if name in tensors and tensors[name].shape != tensor.shape:
            raise WeightsError(
                f"{name} has shape {list(tensors[name].shape)}, but {list(tensor.shape)} "
                "fits the configuration; set what differs, as in anchors.sizes=[32,64,128,256,512]"
            )
