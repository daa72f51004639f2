"""Find classes of a split that are probably typing errors."""

from ...classes import similar_names
from ..coco.dataset import CocoDataset


def suspicious_classes(dataset: CocoDataset) -> dict[str, tuple[str, ...]]:
    """Return the suspicious class names of a split by the reason."""
    similar = similar_names(category.name for category in dataset.categories)
    return {"class names that differ only in case or blanks": similar} if similar else {}
