"""Conversion of another implementation's weights to a checkpoint."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

import torch
from pydantic import Field, ValidationError
from torch import Tensor
from torchvision.models.detection import MaskRCNN_ResNet50_FPN_Weights

from ..bundle.manifest import Category, Preprocessing
from ..bundle.spec import BUCKET_STEP, ResizeRule, ShapeBucket
from ..checkpoint import Checkpoint
from ..config.error_messages import validation_message
from ..config.overrides import OverrideError, with_overrides, with_value
from ..config.schema import ModelConfig, YamlConfig
from ..mask_rcnn import MaskRCNN
from ..plurals import abbreviated
from .files import WeightsError
from .layouts import reverse_channels
from .origins import Settings, Weights

# Settings that no weights file holds. All origins have the same defaults for them.
_NEVER_STORED = (
    "anchors.sizes",
    "anchors.aspect_ratios",
    "rpn.nms_iou",
    "roi.score_threshold",
    "roi.nms_iou",
    "roi.max_detections",
    "preprocessing.min_size",
    "preprocessing.max_size",
)
# Last part of the names of batch norm's counters, which do not affect detections.
_COUNTER = "num_batches_tracked"
# Category names by COCO id; index 0 is the background, unused ids are `N/A`.
_COCO_NAMES: tuple[str, ...] = tuple(MaskRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"])


class InputConfig(YamlConfig):
    """Settings for the resizing of input images."""

    min_size: int = Field(800, ge=32)
    """Shorter side of resized images in pixels (smaller if `max_size` limits the longer side)."""
    max_size: int = Field(1333, ge=32)
    """Upper limit of the longer side of resized images in pixels."""
    resize: ResizeRule = "pillow"
    """Rounding and interpolation of resized images."""

    @property
    def buckets(self) -> tuple[ShapeBucket, ...]:
        """Landscape and portrait input size, or one size if the input is square."""
        largest = min(self.min_size, self.max_size), self.max_size
        sides = [math.ceil(side / BUCKET_STEP) * BUCKET_STEP for side in largest]
        return tuple(dict.fromkeys((ShapeBucket(*sides), ShapeBucket(*sides[::-1]))))


class ConversionConfig(ModelConfig):
    """Configuration of a converted model and of its image resizing.

    Arguments of the form `key.path=value` (overrides) can set its keys.
    """

    preprocessing: InputConfig = InputConfig()
    """Resizing of images."""

    @property
    def model(self) -> ModelConfig:
        """Model configuration, without `preprocessing`."""
        return ModelConfig.model_validate(self.model_dump(exclude={"preprocessing"}))


@dataclass(frozen=True, kw_only=True)
class WeightsConversion:
    """Converted checkpoint, with a report of loaded and ignored tensors and assumed settings."""

    checkpoint: Checkpoint
    origin: str
    # Number of the model's tensors that the weights file holds.
    num_loaded: int
    # Names of tensors in the file that do not affect detections.
    ignored: tuple[str, ...]
    # Settings that the file does not hold, with their values in the checkpoint.
    assumed: Settings


def checkpoint_from_weights(
    weights: Weights,
    overrides: Sequence[str] = (),
    categories: Path | None = None,
    *,
    other_channel_order: bool = False,
) -> WeightsConversion:
    """Convert weights to a checkpoint that gives the same results as the original program.

    Args:
        weights: weights of a whole Mask R-CNN.
        overrides: settings of `ConversionConfig` in the form `key.path=value`. They take precedence
            over all settings in `weights`.
        categories: COCO annotation file that names the classes. None: use `default_categories`.
        other_channel_order: whether the network takes RGB although the program that wrote the
            weights usually takes BGR, or the reverse.

    Raises:
        WeightsError: the weights hold a backbone only, or do not fit the configuration. An override
            is not allowed. Or the file `categories` is not readable or does not fit the number of
            classes.
    """
    if not weights.has_heads:
        raise WeightsError(
            f"the file holds only a {weights.structure['backbone.name']} backbone of "
            f"{weights.origin}, without the heads of a detector; start a training from the "
            "backbone with `maskrcnn train CONFIG weights=FILE`"
        )
    settings = config_from_settings(weights.settings, overrides)
    config, inputs = settings.model, settings.preprocessing
    tensors = reverse_channels(weights.tensors) if other_channel_order else weights.tensors
    with torch.device("meta"):  # allocates no memory
        expected = MaskRCNN(config).state_dict()
    check_fit(tensors, expected)
    return WeightsConversion(
        checkpoint=Checkpoint(
            model_config=config,
            weights={name: tensors.get(name, torch.tensor(0)) for name in expected},
            categories=(
                read_categories(categories, config.num_classes)
                if categories
                else default_categories(config.num_classes)
            ),
            preprocessing=Preprocessing(
                **inputs.model_dump(), pixel_mean=config.pixel_mean, pixel_std=config.pixel_std
            ),
            buckets=inputs.buckets,
            iteration=0,
        ),
        origin=weights.origin,
        num_loaded=len(expected.keys() & tensors.keys()),
        ignored=weights.ignored,
        assumed={
            key: attrgetter(key)(settings)
            for key in dict.fromkeys((*weights.assumed, *_NEVER_STORED))
            if key not in weights.structure
        },
    )


def config_from_settings(settings: Settings, overrides: Sequence[str] = ()) -> ConversionConfig:
    """Build a configuration from settings and overrides.

    A key that is in neither of the two has its default value. An override of the form
    `key.path=value` takes precedence over a setting with the same key.

    Raises:
        WeightsError: a key or value is not allowed, or an override is malformed.
    """
    values: dict[str, object] = {}
    for key, value in settings.items():
        values = with_value(values, key, value)
    try:
        return ConversionConfig.model_validate(with_overrides(values, overrides))
    except OverrideError as error:
        raise WeightsError(str(error)) from None
    except ValidationError as error:
        raise WeightsError(validation_message(error, ConversionConfig)) from None


def check_fit(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check that tensors have the names and shapes of a model's state dict (`expected`).

    The counters of batch norms (`num_batches_tracked`) may be missing or superfluous.

    Raises:
        WeightsError: a tensor is missing, superfluous or of another shape.
    """
    missing = [n for n in expected if n not in tensors and not n.endswith(_COUNTER)]
    if missing:
        raise WeightsError(
            f"the weights lack the tensors {abbreviated(missing)}; give the file of a whole Mask "
            "R-CNN"
        )
    surplus = [n for n in tensors if n not in expected and not n.endswith(_COUNTER)]
    if surplus:
        raise WeightsError(
            "the weights contain tensors that the configured model does not have: "
            f"{abbreviated(surplus)}; correct the differing settings with KEY=VALUE"
        )
    check_shapes(tensors, expected)


def check_shapes(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check the shapes of those tensors that are also in a model's state dict (`expected`).

    Raises:
        WeightsError: the shape of a tensor differs.
    """
    for name, tensor in expected.items():
        if name in tensors and tensors[name].shape != tensor.shape:
            raise WeightsError(
                f"tensor {name} has shape {list(tensors[name].shape)}, but the configuration needs "
                f"{list(tensor.shape)}; correct the differing setting with KEY=VALUE, as in "
                "anchors.sizes=[32,64,128,256,512]"
            )


def default_categories(num_classes: int) -> tuple[Category, ...]:
    """Return categories for weights that do not name their classes.

    80 classes get COCO's names. 90 classes get COCO's ids 1 to 90; ids that COCO does not use have
    the name `N/A`. Any other number of classes gets the names `class 1`, `class 2`, ...
    """
    ids = range(1, len(_COCO_NAMES))
    used = [i for i in ids if _COCO_NAMES[i] != "N/A"]
    for candidates in (ids, used):
        if len(candidates) == num_classes:
            return tuple(Category(id=i, name=_COCO_NAMES[i]) for i in candidates)
    return tuple(Category(id=i, name=f"class {i}") for i in range(1, num_classes + 1))


def read_categories(path: Path, num_classes: int) -> tuple[Category, ...]:
    """Read the categories of a COCO annotation file, sorted by id.

    Raises:
        WeightsError: the file cannot be read or has no categories, two categories have the same id,
            or the number of categories is not `num_classes`.
    """
    try:
        entries = json.loads(path.read_bytes())["categories"]
        categories = sorted(
            (Category(id=entry["id"], name=entry["name"]) for entry in entries), key=lambda c: c.id
        )
    except OSError as error:
        raise WeightsError(
            f"cannot read {path}: {error.strerror}; give a COCO annotation file"
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise WeightsError(
            f"{path} has no `categories` with an id (int64) and a name; give a COCO annotation file"
        ) from None
    for first, second in pairwise(categories):
        if first.id == second.id:
            raise WeightsError(
                f"{path} has several categories with the id {first.id}; give each its own id"
            )
    if len(categories) != num_classes:
        remedy = "give the annotation file of the data set that the weights were trained on"
        if categories[-1].id == num_classes:
            # The labels of torchvision's models are category ids.
            remedy = (
                f"if the labels of the weights are the ids 1 to {num_classes}, give a file with a "
                "category for each id, or, if these are COCO's ids, leave out --categories"
            )
        raise WeightsError(
            f"{path} has {len(categories)} categories, but the weights have {num_classes} classes; "
            f"{remedy}"
        )
    return tuple(categories)
