"""Each check, with one suspicious annotation among valid ones."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coco_folder import HEIGHT, WIDTH, annotation, valid_content, write_folder

from maskrcnn_trt.training.data.coco.dataset import CocoDataset
from maskrcnn_trt.training.data.inspect.annotation_checks import suspicious_annotations

NO_PIXELS = {"size": [HEIGHT, WIDTH], "counts": [HEIGHT * WIDTH]}


def found_with(folder: Path, *annotations: dict[str, Any]) -> list[tuple[str, str]]:
    """Return subject and reason of each suspicion after adding annotations to valid ones."""
    content = valid_content()
    content["annotations"] += annotations
    dataset = CocoDataset(write_folder(folder, content), on_broken="refuse")
    return [(s.subject, s.reason) for s in suspicious_annotations(dataset.records)]


def ring(*points: float) -> dict[str, Any]:
    return {"segmentation": [list(points)]}


@pytest.mark.parametrize(
    "changes",
    [
        # the rasterized mask and its box exceed the outline by a border
        {"area": 1271, "bbox": [9, 19, 32, 42]},
        # COCO has boxes that leave the image by a fraction
        {"bbox": [130, 20, 30.6, 40], **ring(130, 20, 160.6, 20, 160.6, 60, 130, 60)},
        # the first point repeated at the end
        ring(10, 20, 40, 20, 40, 60, 10, 60, 10, 20),
        # two pieces that overlap: their union is smaller than their sum
        {"segmentation": [[10, 20, 40, 20, 40, 60, 10, 60], [12, 22, 38, 22, 38, 58, 12, 58]]},
    ],
)
def test_what_is_common_and_harmless_is_not_suspicious(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    assert found_with(tmp_path, annotation(77, 11, **changes)) == []


def test_images_without_annotations_have_no_suspicious_ones(tmp_path: Path) -> None:
    content = {**valid_content(), "annotations": []}
    assert suspicious_annotations(CocoDataset(write_folder(tmp_path, content)).records) == []


RUNS = next(a for a in valid_content()["annotations"] if a["id"] == 2)
BOX, AREA = "box does not fit the segmentation", "area does not fit the segmentation"
EMPTY = "segmentation, or one of its polygons, has no area"
OUTSIDE = "box or outline sticks out of the image"
FAR_RING = ring(140, 20, 170, 20, 170, 60, 140, 60)
LARGE_RING = ring(-1500, 20, 1500, 20, 1500, 1500)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bbox": [10, 20, 30, 36]}, BOX),
        ({"bbox": [20, 10, 40, 30]}, BOX),
        ({**RUNS, "bbox": [41, 25, 70, 79]}, BOX),
        *(({"area": area}, AREA) for area in (900, 1500, 0)),
        ({**RUNS, "area": RUNS["area"] * 1.2}, AREA),
        (
            {
                "bbox": [100, 20, 1.5, 40],
                "area": 60,
                **ring(100, 20, 101.5, 20, 101.5, 60, 100, 60),
            },
            "box less than 2 pixels wide or high",
        ),
        ({"segmentation": [*annotation(1, 5)["segmentation"], [10, 20, 30, 40, 20, 30]]}, EMPTY),
        (ring(10, 20, 40, 60, 40, 20, 10, 60), "outline crosses or touches itself"),
        ({"bbox": [140, 20, 30, 40], **FAR_RING}, OUTSIDE),
        ({"bbox": [140, 20, 20, 40], **FAR_RING}, OUTSIDE),
    ],
)
def test_one_suspicious_annotation_is_named(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    changed = {**annotation(77, 11), **changes, "id": 77, "image_id": 11}
    assert found_with(tmp_path, changed) == [("77", reason)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"segmentation": NO_PIXELS}, EMPTY),
        ({"bbox": [-1500, 20, 1600, 40], **LARGE_RING}, OUTSIDE),
    ],
)
def test_annotations_may_be_suspicious_for_several_reasons(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    assert ("77", reason) in found_with(tmp_path, annotation(77, 11, **changes))


def test_many_masks_are_measured(tmp_path: Path) -> None:
    side = 300
    content = {**valid_content(), "annotations": []}
    content["images"] = [{"id": 1, "file_name": "1.jpg", "height": side, "width": side}]
    for n in range(side):
        # one pixel column each
        counts = [n * side, side, (side - n - 1) * side]
        runs = {"size": [side, side], "counts": counts}
        box = {"bbox": [n, 0, 1, side], "area": side if n else 1, "segmentation": runs}
        content["annotations"].append(annotation(n, 1, **box))
    found = suspicious_annotations(CocoDataset(write_folder(tmp_path, content)).records)
    wrong = [s.subject for s in found if s.reason == "area does not fit the segmentation"]
    assert wrong == ["0"]


REPEATED = "nearly the same box and class as another"


def test_repeated_boxes_are_found_once_for_each_repetition(tmp_path: Path) -> None:
    shifted = {"bbox": [10.2, 20, 30, 40]}
    found = found_with(
        tmp_path,
        annotation(70, 11),
        annotation(71, 11, category_id=30),
        annotation(72, 11, iscrowd=1),
        annotation(73, 11, **shifted),
        annotation(74, 11, bbox=[12, 20, 28, 40]),
        annotation(75, 2, **shifted),
    )
    assert [pair for pair in found if pair[1] == REPEATED] == [("75", REPEATED), ("73", REPEATED)]


def overlap(one: Any, other: Any) -> float:
    """Return the IoU of two boxes x, y, width, height."""
    ends = [min(one[n] + one[n + 2], other[n] + other[n + 2]) for n in (0, 1)]
    shared = math.prod(max(0.0, ends[n] - max(one[n], other[n])) for n in (0, 1))
    return shared / (one[2] * one[3] + other[2] * other[3] - shared)


def test_repetitions_are_those_that_a_comparison_of_all_pairs_finds(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    corners = rng.integers(0, 8, (200, 2)) + rng.normal(0, 0.3, (200, 2)) + 5
    boxes = np.hstack([corners, rng.normal(60, 0.8, (200, 2))]).round(2)
    labels = rng.choice([7, 30], 200)
    found = found_with(
        tmp_path,
        *(
            annotation(100 + n, 11, bbox=box.tolist(), category_id=int(label))
            for n, (box, label) in enumerate(zip(boxes, labels, strict=True))
        ),
    )

    expected = {
        str(100 + n)
        for n in range(200)
        for earlier in range(n)
        if labels[n] == labels[earlier] and overlap(boxes[n], boxes[earlier]) > 0.95
    }
    assert 20 < len(expected) < 180
    assert {subject for subject, reason in found if reason == REPEATED} == expected
