"""Find classes whose names are probably misspelt, and classes that training would reject."""

from ...config import ConfigError
from ..coco.categories import check_categories, similar_names
from ..coco.dataset import CocoDataset


def suspicious_classes(dataset: CocoDataset, train: CocoDataset | None) -> dict[str, list[str]]:
    """Find a split's classes with probably misspelt names, and those that training would reject.

    Args:
        dataset: Split to check.
        train: Training split, which determines the classes of the model. None: there is no training
            split.

    Returns:
        Details by description of the problem. Details are groups of similar names, the error that
        training would raise, or the annotation file of a training split without objects.
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
