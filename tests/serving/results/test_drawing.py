import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from maskrcnn_trt.model.masks import Rle, rle_from_mask
from maskrcnn_trt.serving.detections import Detections
from maskrcnn_trt.serving.results.drawing import colour_from_label, draw_detections


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
