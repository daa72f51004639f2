"""Compare the categories of a COCO data set with a model's classes and with each other."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ....model.bundle.manifest import Category
from ...config import ConfigError
from .dataset import CocoDataset


def check_categories(dataset: CocoDataset, known: Sequence[Category]) -> None:
    """Check that a model has every category of an evaluation data set, with the same id and name.

    Args:
        dataset: Data set to evaluate on. It may lack some of the model's classes.
        known: Classes of the model.

    Raises:
        ConfigError: The model lacks a category id of the data set, or has another name for it.
    """
    names = {category.id: category.name for category in known}
    for id_, name in ((category.id, category.name) for category in dataset.categories):
        if names.get(id_) != name:
            other = f"is {names[id_]!r}" if id_ in names else "does not exist"
            raise ConfigError(
                f"category {id_} of {dataset.name} is {name!r}, but category {id_} of the model "
                f"{other}; {_remedy(name, known)}"
            )


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
        known: Classes of the model. One may have the same name and another id.
    """
    for category in known:
        if _folded(category.name) == _folded(name):
            return (
                f"change the category to id {category.id} and name {category.name!r} in this file"
            )
    return (
        "give the category the id and the name of a class of the model, or remove the category "
        "with `maskrcnn data filter --classes` (for converted weights, set the model's classes "
        "with `maskrcnn weights convert --categories`)"
    )


def _folded(name: str) -> str:
    """Return a class name case-folded and without blanks, for comparisons."""
    return "".join(name.split()).casefold()
