from pathlib import Path

import pytest

from maskrcnn_trt.model.bundle.manifest import Category
from maskrcnn_trt.training.config import ConfigError, DatasetConfig
from maskrcnn_trt.training.data.coco.categories import check_categories
from maskrcnn_trt.training.data.coco.dataset import CocoDataset


@pytest.fixture(scope="module")
def dataset(tiny_config: Path) -> CocoDataset:
    """Data set with the categories 1 circle, 2 ring and 3 star."""
    folder = tiny_config.parent
    annotations = folder / "annotations" / "val.json"
    return CocoDataset(DatasetConfig(images=folder / "val", annotations=annotations))


def _known(**ids: int) -> list[Category]:
    return [Category(id=id_, name=name) for name, id_ in ids.items()]


def test_a_model_may_have_more_classes_than_the_data(dataset: CocoDataset) -> None:
    check_categories(dataset, _known(circle=1, ring=2, star=3))
    check_categories(dataset, _known(sun=0, circle=1, ring=2, star=3, moon=4))


@pytest.mark.parametrize(
    ("known", "difference", "remedy"),
    [
        (
            _known(circle=1, star=2, ring=3),
            " is 'ring', but category 2 of the model is 'star'",
            "id 3 and name 'ring'",
        ),
        (
            _known(circle=0, ring=1, star=2),
            " is 'circle', but category 1 of the model is 'ring'",
            "id 0 and name 'circle'",
        ),
        (
            _known(Circle=1, ring=2, star=3),
            " is 'circle', but category 1 of the model is 'Circle'",
            "id 1 and name 'Circle'",
        ),
        (
            _known(circle=1, ring=2),
            " is 'star', but category 3 of the model does not exist",
            "data filter --classes.*--categories",
        ),
    ],
)
def test_the_first_category_that_differs_is_named(
    dataset: CocoDataset, known: list[Category], difference: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=f"{difference}.*{remedy}"):
        check_categories(dataset, known)
