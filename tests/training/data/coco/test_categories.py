from pathlib import Path

import pytest

from maskrcnn_trt.model.bundle.manifest import Category
from maskrcnn_trt.training.config import ConfigError, DatasetConfig
from maskrcnn_trt.training.data.coco.categories import with_ids_of
from maskrcnn_trt.training.data.coco.dataset import CocoDataset


@pytest.fixture(scope="module")
def dataset(tiny_config: Path) -> CocoDataset:
    """Data set with the categories 1 circle, 2 ring and 3 star."""
    folder = tiny_config.parent
    annotations = folder / "annotations" / "val.json"
    return CocoDataset(DatasetConfig(images=folder / "val", annotations=annotations))


def _known(**ids: int) -> list[Category]:
    return [Category(id=id_, name=name) for name, id_ in ids.items()]


@pytest.mark.parametrize(
    ("known", "ids"),
    [
        (_known(circle=1, ring=2, star=3), (1, 2, 3)),
        (_known(star=0, circle=1, ring=2), (3, 1, 2)),
        (_known(sun=0, circle=7, ring=8, moon=2, star=9), (0, 1, 2, 10, 3)),
    ],
    ids=["same ids", "other ids", "more classes"],
)
def test_classes_of_a_model_are_matched_by_name(
    dataset: CocoDataset, known: list[Category], ids: tuple[int, ...]
) -> None:
    assert tuple(category.id for category in with_ids_of(dataset, known)) == ids


@pytest.mark.parametrize(
    ("known", "difference", "remedy"),
    [
        (_known(Circle=1, ring=2, star=3), "category 1 .* is 'circle'", "to 'Circle' in this file"),
        (
            _known(circle=1, ring=2),
            "category 3 .* is 'star'",
            "data filter --classes.*--categories",
        ),
        (
            [*_known(ring=2, star=3), Category(id=7, name="circle (7)")],
            "category 1 .* is 'circle'",
            r"named 'circle' in the training set different names.*ring, star, circle \(7\)",
        ),
    ],
)
def test_the_first_category_that_a_model_lacks_is_named(
    dataset: CocoDataset, known: list[Category], difference: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=f"{difference}.*not a class of the model.*{remedy}"):
        with_ids_of(dataset, known)


def test_classes_of_equal_names_need_the_ids_of_the_model(dataset: CocoDataset) -> None:
    second = Category(id=4, name="ring")
    known = (*_known(circle=1, ring=2, star=3), second)
    assert with_ids_of(dataset, known) == known
    with pytest.raises(ConfigError, match="2 have the name 'ring'"):
        with_ids_of(dataset, [*_known(circle=1, star=2, ring=3), second])
