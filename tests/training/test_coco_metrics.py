import io

import pytest
from rich.console import Console

from maskrcnn_trt.model.manifest import Category
from maskrcnn_trt.training.coco_metrics import class_table, coco_metrics, summary_lines

CATEGORIES = (Category(id=4, name="disc"), Category(id=9, name="ring"), Category(id=11, name="bar"))
SQUARE = [10.0, 10.0, 40.0, 40.0]
TRUTH = {
    "info": {},
    "images": [{"id": 1, "height": 100, "width": 100}],
    "categories": [category.model_dump() for category in CATEGORIES],
    "annotations": [
        {"id": n, "image_id": 1, "category_id": c, "bbox": SQUARE, "area": 1600.0, "iscrowd": 0}
        for n, c in ((1, 4), (2, 9))
    ],
}
"""A disc and a ring, of medium size, in one place."""


def _found(category: int, box: list[float] = SQUARE) -> dict[str, object]:
    return {"image_id": 1, "category_id": category, "bbox": box, "score": 0.9}


def test_metrics_of_a_case_worked_out_by_hand() -> None:
    """The disc is found, of the ring a part of IoU 0.7, a bar where there is none."""
    results = [_found(4), _found(9, [10.0, 10.0, 28.0, 40.0]), _found(11)]
    metrics = coco_metrics(TRUTH, results, "bbox", CATEGORIES)
    # The ring counts at 0.50, 0.55, ..., 0.70: half of the thresholds.
    expected = {
        "AP": 0.75, "AP50": 1, "AP75": 0.5, "APs": -1, "APm": 0.75, "APl": -1,
        "AR1": 0.75, "AR10": 0.75, "AR100": 0.75, "ARs": -1, "ARm": 0.75, "ARl": -1,
        "AP/disc": 1, "AP/ring": 0.5, "AP/bar": -1,
    }  # fmt: skip
    assert metrics == pytest.approx({f"bbox/{name}": value for name, value in expected.items()})


@pytest.mark.parametrize("missing", ["annotations", "images"])
def test_nothing_to_be_found_is_minus_one(missing: str) -> None:
    assert set(coco_metrics({**TRUTH, missing: []}, [], "bbox", CATEGORIES).values()) == {-1}


def test_nothing_found_is_zero() -> None:
    metrics = coco_metrics(TRUTH, [], "bbox", CATEGORIES)
    assert metrics["bbox/AP"] == metrics["bbox/AR100"] == metrics["bbox/AP/disc"] == 0
    assert metrics["bbox/APl"] == metrics["bbox/AP/bar"] == -1


def test_the_summary_has_twelve_lines() -> None:
    lines = summary_lines(coco_metrics(TRUTH, [_found(4)], "bbox", CATEGORIES), "bbox")
    assert len(lines) == 12
    assert lines[0] == (
        " Average Precision  (AP) @[ IoU=0.50:0.95 | area=   all | maxDets=100 ] = 0.500"
    )
    assert lines[11] == (
        " Average Recall     (AR) @[ IoU=0.50:0.95 | area= large | maxDets=100 ] = -1.000"
    )


def test_classes_are_listed() -> None:
    boxes = coco_metrics(TRUTH, [_found(4)], "bbox", CATEGORIES)
    masks = {name.replace("bbox", "segm"): value / 2 for name, value in boxes.items()}
    console = Console(file=io.StringIO(), width=80)
    console.print(class_table(boxes | masks))
    assert isinstance(console.file, io.StringIO)
    rows = [line.replace("│", " ").split() for line in console.file.getvalue().splitlines()]
    assert ["disc", "1.000", "0.500"] in rows
    assert ["ring", "0.000", "0.000"] in rows


@pytest.mark.parametrize("name", ["[/x]", "[red]", ":smile:"])
def test_names_of_classes_are_not_markup(name: str) -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(class_table({f"bbox/AP/{name}": 1.0, f"segm/AP/{name}": 1.0}))
    assert isinstance(console.file, io.StringIO)
    assert f" {name} " in console.file.getvalue()
