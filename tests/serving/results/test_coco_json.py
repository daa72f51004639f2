import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pycocotools.coco import COCO

from maskrcnn_trt.serving.detections import DetectionOptions, MaskFormat
from maskrcnn_trt.serving.offline.detector import Detector
from maskrcnn_trt.serving.results.coco_json import coco_results, image_ids

Encode = Callable[..., bytes]


@pytest.mark.parametrize(
    ("name", "image_id"),
    [("000000000139.jpg", 139), ("7.png", 7), ("cat.jpg", "cat"), ("-3.png", "-3")],
)
def test_image_id_is_the_stem(name: str, image_id: int | str) -> None:
    assert image_ids([Path("folder") / name]) == [image_id]


def test_pycocotools_loads_the_results(bundle: Path, picture: Encode, tmp_path: Path) -> None:
    detections = Detector(bundle).detect(picture())
    path = tmp_path / "detections.json"
    path.write_text(json.dumps(coco_results(139, detections)))
    dataset = COCO()
    categories = [{"id": i} for i in (3, 7, 8)]
    dataset.dataset = {"images": [{"id": 139}], "categories": categories, "info": {}}
    dataset.createIndex()
    results = dataset.loadRes(str(path))
    annotations = results.loadAnns(results.getAnnIds(imgIds=[139]))
    assert len(annotations) == len(detections) > 0
    for annotation, box in zip(annotations, detections.boxes, strict=True):
        x, y, width, height = annotation["bbox"]
        assert [x, y, x + width, y + height] == pytest.approx(box.tolist())
        assert annotation["category_id"] in (3, 7, 8)
        assert annotation["segmentation"]["size"] == [120, 200]


def test_results_without_masks_have_no_segmentation(bundle: Path, picture: Encode) -> None:
    options = DetectionOptions(mask_format=MaskFormat.NONE)
    records = coco_results("cat", Detector(bundle).detect(picture(), options))
    assert all(record["image_id"] == "cat" for record in records)
    assert not any("segmentation" in record for record in records)
