import json
import secrets
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pycocotools.coco import COCO

from maskrcnn_trt.model.image_limits import ImageError
from maskrcnn_trt.model.masks import Rle, rle_from_mask
from maskrcnn_trt.serving.detections import DetectionOptions, Detections, MaskFormat
from maskrcnn_trt.serving.offline import Detector
from maskrcnn_trt.serving.result_formats import (
    annotated_png,
    coco_results,
    colour_from_label,
    draw_detections,
    image_ids,
)

Encode = Callable[..., bytes]


@pytest.mark.parametrize(
    ("name", "image_id"),
    [("000000000139.jpg", 139), ("7.png", 7), ("cat.jpg", "cat"), ("-3.png", "-3")],
)
def test_image_id_is_the_stem(name: str, image_id: int | str) -> None:
    assert image_ids([Path("folder") / name]) == [image_id]


def test_pycocotools_loads_the_results(
    predictor: Detector, picture: Encode, tmp_path: Path
) -> None:
    detections = predictor.detect(picture())
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


def test_results_without_masks_have_no_segmentation(predictor: Detector, picture: Encode) -> None:
    options = DetectionOptions(mask_format=MaskFormat.NONE)
    records = coco_results("cat", predictor.detect(picture(), options))
    assert all(record["image_id"] == "cat" for record in records)
    assert not any("segmentation" in record for record in records)


def detections(
    height: int, width: int, count: int = 1, masks: tuple[Rle, ...] | None = None
) -> Detections:
    """Return detections in the centre, half the image's size."""
    box = [[width // 4, height // 4, width * 3 // 4, height * 3 // 4]] * count
    return Detections(
        height=height,
        width=width,
        boxes=np.array(box, np.float32).reshape(count, 4),
        scores=np.full(count, 0.5, np.float32),
        labels=np.full(count, 2, np.int64),
        category_ids=np.full(count, 7, np.int64),
        class_names=("box",) * count,
        rles=masks,
    )


@pytest.mark.parametrize(("height", "width"), [(480, 640), (8, 8), (2000, 900)])
def test_mask_and_box_take_the_colour_of_the_class(height: int, width: int) -> None:
    image = np.full((height, width, 3), 40, np.uint8)
    mask = np.zeros((height, width), np.bool_)
    mask[height // 4 : height * 3 // 4, width // 4 : width * 3 // 4] = True  # fills the box
    drawn = draw_detections(image, detections(height, width, masks=(rle_from_mask(mask),)))
    assert drawn.shape == image.shape
    assert drawn.dtype == np.uint8
    assert (image == 40).all()
    colour = np.array(colour_from_label(2))
    if height > 100:
        middle = drawn[height // 2, width // 2].astype(int)
        np.testing.assert_allclose(middle, 40 + 0.45 * (colour - 40), atol=1)
        np.testing.assert_array_equal(drawn[height // 2, width // 4], colour)
        np.testing.assert_array_equal(drawn[height - 1, width - 1], [40, 40, 40])


def test_overlapping_masks_are_blended_by_ascending_score() -> None:
    random = np.random.default_rng(0)
    image = random.integers(0, 256, (700, 900, 3), np.uint8)  # several strips
    masks = random.random((3, 700, 900)) > 0.5
    masks[2] = False
    found = detections(700, 900, 3, tuple(rle_from_mask(mask) for mask in masks))
    found = replace(found, boxes=np.zeros((3, 4), np.float32), labels=np.arange(3))
    expected = image.astype(np.float32)
    for label in (2, 1, 0):
        colour = np.array(colour_from_label(label), np.float32)
        expected[masks[label]] += 0.45 * (colour - expected[masks[label]])
    below_labels = slice(300, None)
    np.testing.assert_array_equal(
        draw_detections(image, found)[below_labels], expected.round()[below_labels]
    )


def test_labels_have_all_characters_of_installed_fonts(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("matplotlib")  # its wheel contains DejaVu Sans
    image = np.zeros((80, 120, 3), np.uint8)
    names = ("\N{REPLACEMENT CHARACTER}", "é", "ж")
    drawn = [draw_detections(image, replace(detections(80, 120), class_names=(n,))) for n in names]
    assert not any(np.array_equal(drawn[a], drawn[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    assert not caplog.records
    letter = chr(0xE000 + secrets.randbelow(0x1000))  # for private use; not used in other tests
    for side in (80, 2000):
        image = np.zeros((side, side, 3), np.uint8)
        draw_detections(image, replace(detections(side, side), class_names=(letter,)))
    (record,) = caplog.records
    assert "install a font" in record.getMessage()


def test_drawing_masks_takes_less_memory_than_floats() -> None:
    mask = np.zeros((2000, 2000), np.bool_)
    mask[500:1500, 500:1500] = True
    found = detections(2000, 2000, masks=(rle_from_mask(mask),))
    image = np.zeros((2000, 2000, 3), np.uint8)
    tracemalloc.start()
    draw_detections(image, found)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * image.nbytes


@pytest.mark.parametrize("size", [(99, 60), (100, 61), (200, 120)])
def test_image_of_another_size_is_rejected(picture: Encode, size: tuple[int, int]) -> None:
    found = detections(100, 60, masks=(rle_from_mask(np.ones((100, 60), np.bool_)),))
    message = f"{size[0]}x{size[1]} .*100x60"
    with pytest.raises(ImageError, match=message):
        annotated_png(picture(size=size), found)
    with pytest.raises(ImageError, match=message):
        draw_detections(np.zeros((*size, 3), np.uint8), found)


def test_boxes_are_drawn_without_masks() -> None:
    image = np.zeros((100, 100, 3), np.uint8)
    drawn = draw_detections(image, detections(100, 100))
    np.testing.assert_array_equal(drawn[75, 50], colour_from_label(2))
    assert not drawn[50, 50].any()


def test_image_without_detections_is_unchanged() -> None:
    image = np.random.default_rng(0).integers(0, 256, (50, 60, 3)).astype(np.uint8)
    nothing = detections(50, 60, count=0, masks=())
    np.testing.assert_array_equal(draw_detections(image, nothing), image)


def test_colours_of_neighbouring_classes_differ() -> None:
    colours = np.array([colour_from_label(label) for label in range(1, 9)])
    distances = np.abs(colours[:, None] - colours[None]).sum(-1)
    assert distances[~np.eye(8, dtype=bool)].min() > 60
