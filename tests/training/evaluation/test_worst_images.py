import base64
import io
import re
from pathlib import Path
from typing import Any

import pytest
from coco_folder import HEIGHT, WIDTH, annotation, ring_segmentation, valid_content, write_folder
from PIL import Image
from pycocotools import mask as coco_mask

from maskrcnn_trt.training.data.coco.dataset import CocoDataset
from maskrcnn_trt.training.evaluation.matching import confusion_matrix, matched_images
from maskrcnn_trt.training.evaluation.report import write_report
from maskrcnn_trt.training.evaluation.worst_images import draw_worst_images, errors_of

# Minimum scores of the two classes.
THRESHOLDS = (0.5, 0.5)


def detection(image_id: int, category_id: int, score: float, *ring: int) -> dict[str, Any]:
    points = list(ring) or annotation(0, 0)["segmentation"][0]
    (rle,) = coco_mask.frPyObjects([points], HEIGHT, WIDTH)
    mask = {"size": rle["size"], "counts": rle["counts"].decode()}
    keys = {"image_id": image_id, "category_id": category_id, "score": score}
    return {**keys, "segmentation": mask}


@pytest.fixture
def dataset(tmp_path: Path) -> CocoDataset:
    content = valid_content()
    crowd = {"segmentation": ring_segmentation(compressed=False), "bbox": [41, 25, 79, 79]}
    content["annotations"] = [
        annotation(1, 5),
        annotation(2, 8),
        annotation(3, 9, category_id=30, iscrowd=1, **crowd),
    ]
    (tmp_path / "data").mkdir()
    return CocoDataset(write_folder(tmp_path / "data", content))


def test_missed_and_wrong_detections_are_counted(tmp_path: Path, dataset: CocoDataset) -> None:
    inside_of_ring = (76, 30, 84, 30, 84, 40, 76, 40)
    results = [
        detection(5, 7, 0.9),
        detection(5, 7, 0.8),  # a second one of the same object
        detection(5, 30, 0.8),  # another class
        detection(8, 7, 0.4),  # below the minimum score
        detection(8, 7, 0.9, 10, 20, 40, 20, 40, 30, 10, 30),  # a quarter of the object
        detection(9, 30, 0.9, *inside_of_ring),
        detection(9, 30, 0.8, *inside_of_ring),
        detection(11, 7, 0.7),
        detection(11, 99, 0.7),  # not a class of the data set
    ]
    images = matched_images(dataset, results)
    errors = [errors_of(image, THRESHOLDS) for image in images]
    counts = {e.record.id: (e.missed, e.wrong) for e in errors}
    assert counts == {2: (0, 0), 5: (0, 2), 8: (1, 1), 9: (0, 0), 11: (0, 1)}
    path = tmp_path / "worst.png"
    assert draw_worst_images(images, dataset.categories, THRESHOLDS, path)
    with Image.open(path) as image:
        assert image.width > 1000


def test_no_file_is_drawn_without_errors(tmp_path: Path, dataset: CocoDataset) -> None:
    images = matched_images(dataset, [detection(5, 7, 0.9), detection(8, 7, 0.9)])
    path = tmp_path / "worst.png"
    assert not draw_worst_images(images, dataset.categories, THRESHOLDS, path)
    assert not path.exists()


def test_confusion_matrix(dataset: CocoDataset) -> None:
    inside_of_ring = (76, 30, 84, 30, 84, 40, 76, 40)
    images = matched_images(
        dataset,
        [
            detection(5, 30, 0.9),  # a square detected as a thing
            detection(8, 7, 0.9),
            detection(9, 30, 0.9, *inside_of_ring),  # in a crowd
            detection(11, 7, 0.7),  # no object
        ],
    )
    assert confusion_matrix(images, [0.5, 0.5]).tolist() == [[1, 1, 0], [0, 0, 0], [1, 0, 0]]
    assert confusion_matrix(images, [0.8, 0.95]).tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert confusion_matrix(images, [1, 1]).tolist() == [[0, 0, 2], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("results", [[], [detection(5, 7, 0.9), detection(11, 7, 0.7)]])
def test_the_report_is_one_file(
    tmp_path: Path, dataset: CocoDataset, results: list[dict[str, Any]]
) -> None:
    name = "<b>$x^2$ & _y\udce9" + 200 * "z"  # would fill the figures
    square, thing = dataset.categories
    dataset.categories = (square.model_copy(update={"name": name}), thing)
    path = tmp_path / "new" / "report.html"
    metrics = {"segm/AP": 0.25, f"segm/AP/{name}": 0.125}
    write_report(path, dataset, results, metrics, {record.id for record in dataset.records})
    page = path.read_text()
    assert "<b>" not in page
    assert f"&lt;b&gt;$x^2$ &amp; _y\N{REPLACEMENT CHARACTER}{200 * 'z'}<" in page
    assert "0.250" in page
    # Objects, box AP, mask AP, best threshold, precision, recall, F1. Two squares are annotated.
    best = ["0.900", "1.000", "0.500", "0.667"] if results else ["-"] * 4
    assert "".join(f"<td>{cell}</td>" for cell in ("2", "-", "0.125", *best)) in page
    sources = re.findall(r'src="([^"]*)"', page)
    assert len(sources) == 3
    for source in sources:
        with Image.open(
            io.BytesIO(base64.b64decode(source.removeprefix("data:image/png;base64,")))
        ) as image:
            assert image.width > 300
    assert "http" not in re.sub('src="[^"]*"', "", page)
