"""Names of the classes of converted weights."""

import json
from pathlib import Path

from torchvision.models.detection import MaskRCNN_ResNet50_FPN_Weights

from ..manifest import Category
from .files import WeightsError

_COCO_NAMES: tuple[str, ...] = tuple(MaskRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"])
"""By id, from the background on; ids that COCO left out are `N/A`."""


def default_categories(num_classes: int) -> tuple[Category, ...]:
    """COCO's where there are so many, else numbered ones.

    80 classes are those that COCO annotates; 90 are all its ids, as torchvision counts them.
    """
    ids = range(1, len(_COCO_NAMES))
    used = [i for i in ids if _COCO_NAMES[i] != "N/A"]
    for candidates in (ids, used):
        if len(candidates) == num_classes:
            return tuple(Category(id=i, name=_COCO_NAMES[i]) for i in candidates)
    return tuple(Category(id=i, name=f"class {i}") for i in range(1, num_classes + 1))


def read_categories(path: Path, num_classes: int) -> tuple[Category, ...]:
    """Categories of a COCO annotation file, by rising id.

    Raises:
        WeightsError: the file has no categories, or another number of them.
    """
    try:
        entries = json.loads(path.read_bytes())["categories"]
        categories = sorted(
            (Category(id=entry["id"], name=entry["name"]) for entry in entries), key=lambda c: c.id
        )
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}; give a COCO annotation file") from None
    except (ValueError, KeyError, TypeError):
        raise WeightsError(
            f"{path} has no `categories` with id and name; give a COCO annotation file"
        ) from None
    if len(categories) != num_classes:
        raise WeightsError(
            f"{path} has {len(categories)} categories, but the weights have {num_classes} classes; "
            "give the annotations of the data set that they were trained on"
        )
    return tuple(categories)
