"""Compare the categories of a COCO data set with a model's classes and with each other."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from ....model.bundle.manifest import Category
from ....model.plurals import abbreviated
from ...config import ConfigError
from .dataset import CocoDataset

# Maximum number of class names in an error message.
_NAMES_SHOWN = 20


def check_categories(dataset: CocoDataset, known: Sequence[Category]) -> None:
    """Check that a model has a class of the same name for every category of a data set.

    Args:
        dataset: Data set to evaluate on. It may lack some of the model's classes.
        known: Classes of the model.

    Raises:
        ConfigError: The model lacks a category of the data set.
    """
    names = {category.name for category in known}
    for category in dataset.categories:
        if category.name not in names:
            raise ConfigError(
                f"category {category.id} of {dataset.name} is {category.name!r}, which is not a "
                f"class of the model; {_remedy(category.name, known)}; the model's classes: "
                f"{abbreviated([own.name for own in known], _NAMES_SHOWN)}"
            )


def with_ids_of(dataset: CocoDataset, known: Sequence[Category]) -> tuple[Category, ...]:
    """Return a model's classes, with the category ids of a data set.

    Data sets can have different ids for a class: YOLO counts from 0, CVAT from 1. Classes and
    categories are matched by name. If the ids of all categories are those of the model, no id
    changes. Otherwise, a class that the data set lacks keeps its id, unless the data set uses this
    id for another class. Then the class gets a new id.

    Raises:
        ConfigError: The model lacks a category of the data set. Or the ids differ, and classes
            cannot be matched, because two categories or two classes have the same name.
    """
    check_categories(dataset, known)
    if set(dataset.categories) <= set(known):
        return tuple(known)
    for categories in (dataset.categories, known):
        ((name, count),) = Counter(category.name for category in categories).most_common(1)
        if count > 1:
            raise ConfigError(
                f"the category ids in {dataset.name} are not those of the model, and the classes "
                f"cannot be matched by name, because {count} have the name {name!r}; give the "
                "categories in this file the ids of the model"
            )
    ids = {category.name: category.id for category in dataset.categories}
    used = {*ids.values(), *(category.id for category in known)}
    free = itertools.count(max(used) + 1)
    for category in known:
        if category.name not in ids:
            taken = category.id in ids.values()
            ids[category.name] = next(free) if taken else category.id
    return tuple(Category(id=ids[category.name], name=category.name) for category in known)


def similar_names(names: Iterable[str]) -> list[str]:
    """Return groups of class names that differ only in case or blanks.

    Each group is a text such as `'Cat' and 'cat'`.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys(names):
        groups[_folded(name)].append(name)
    return [" and ".join(map(repr, group)) for group in groups.values() if len(group) > 1]


def _remedy(name: str, known: Sequence[Category]) -> str:
    """Return the remedy, as part of an error message, for a category that a model lacks.

    Args:
        name: Name of the category.
        known: Classes of the model. If the name of a class differs from `name` only in case or
            blanks, the remedy is to rename the category to the name of this class.
    """
    for category in known:
        if _folded(category.name) == _folded(name):
            return f"rename the category to {category.name!r} in this file"
        if category.name == f"{name} ({category.id})":  # renamed by `CocoDataset`
            return f"give the categories named {name!r} in the training set different names"
    return (
        "give the category the name of a class of the model, or remove the category (in a COCO "
        "file, with `maskrcnn data filter --classes`); if the model's weights were converted, its "
        "classes can be set with `maskrcnn weights convert --categories`"
    )


def _folded(name: str) -> str:
    """Return a class name case-folded and without blanks, for comparisons."""
    return "".join(name.split()).casefold()
