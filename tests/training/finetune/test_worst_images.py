import json
from pathlib import Path
from typing import Any

import pytest
from coco_folder import HEIGHT, WIDTH, annotation, ring_segmentation, valid_content, write_folder
from PIL import Image
from pycocotools import mask as coco_mask

from maskrcnn_trt.training.data.coco.dataset import CocoDataset
from maskrcnn_trt.training.finetune.worst_images import draw_worst_images, find_errors

# pycocotools 2.0.11 with numpy 2
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


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


def write_results(folder: Path, *results: dict[str, Any]) -> None:
    (folder / "inference").mkdir()
    (folder / "inference" / "segm.json").write_text(json.dumps(results))


def test_missed_and_wrong_detections_are_counted(tmp_path: Path, dataset: CocoDataset) -> None:
    inside_of_ring = (76, 30, 84, 30, 84, 40, 76, 40)
    write_results(
        tmp_path,
        detection(5, 7, 0.9),
        detection(5, 7, 0.8),  # a second one of the same object
        detection(5, 30, 0.8),  # another class
        detection(8, 7, 0.4),  # below the minimum score
        detection(8, 7, 0.9, 10, 20, 40, 20, 40, 30, 10, 30),  # a quarter of the object
        detection(9, 30, 0.9, *inside_of_ring),
        detection(9, 30, 0.8, *inside_of_ring),
        detection(11, 7, 0.7),
    )
    counts = {e.record.id: (e.missed, e.wrong) for e in find_errors(dataset, tmp_path)}
    assert counts == {2: (0, 0), 5: (0, 2), 8: (1, 1), 9: (0, 0), 11: (0, 1)}
    path = draw_worst_images(dataset, tmp_path)
    assert path is not None
    with Image.open(path) as image:
        assert image.width > 1000


def test_no_file_is_drawn_without_errors(tmp_path: Path, dataset: CocoDataset) -> None:
    write_results(tmp_path, detection(5, 7, 0.9), detection(8, 7, 0.9))
    assert draw_worst_images(dataset, tmp_path) is None
