"""Find classes whose names are probably misspelt, and classes that training would reject."""

from ...config import ConfigError
from ..coco.categories import check_categories, similar_names
from ..coco.dataset import CocoDataset


def suspicious_classes(dataset: CocoDataset, train: CocoDataset | None) -> dict[str, list[str]]:
    """Find classes with probably misspelt names, and causes for which training would fail.

    Args:
        dataset: Split to check.
        train: Training split, which determines the classes of the model. None: there is no training
            split.

    Returns:
        Details by description of the problem: groups of similar class names; the error that
        training would raise for the split's categories; the name of `dataset`, if it is the
        training split and has no objects.
    """
    findings = {}
    if similar := similar_names(category.name for category in dataset.categories):
        findings["class names that differ only in case or blanks"] = similar
    if dataset is train and not any(record.objects for record in dataset.records):
        findings["no objects to train on"] = [dataset.name]
    if train is not None:
        try:
            check_categories(dataset, train.categories)
        except ConfigError as error:
            findings["categories that training rejects"] = [str(error)]
    return findings
