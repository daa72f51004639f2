"""Choice and drawing of sample images."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coco_folder import annotation, valid_content, write_folder
from PIL import Image

from maskrcnn_trt.training.data.coco.dataset import CocoDataset
from maskrcnn_trt.training.data.inspect.annotation_checks import Suspicion, suspicious_annotations
from maskrcnn_trt.training.data.inspect.sample_grid import GridSample, choose_samples, draw_samples

BACKGROUND = (0, 30, 90)


def content_with_suspicions() -> dict[str, Any]:
    content = valid_content()
    # Matplotlib would parse this name as a formula.
    content["categories"][1]["name"] = "$\\frac{$"
    content["annotations"] += [annotation(n, 11) for n in (70, 71, 72, 73)]
    content["annotations"].append(annotation(74, 2, bbox=[-40, 20, 300, 40]))
    return content


@pytest.fixture
def dataset(tmp_path: Path) -> CocoDataset:
    return CocoDataset(write_folder(tmp_path, content_with_suspicions()))


def test_half_are_suspicious_of_every_reason_and_half_random(dataset: CocoDataset) -> None:
    suspicions = suspicious_annotations(dataset.records)
    assert {s.reason for s in suspicions} == {
        "box or outline sticks out of the image",
        "box does not fit the segmentation",
        "nearly the same box and class as another",
    }
    samples = choose_samples([dataset], suspicions, 8, seed=0)
    assert [sample.suspicion is None for sample in samples] == [False] * 4 + [True] * 4
    reasons = [sample.suspicion.reason for sample in samples[:4] if sample.suspicion]
    assert len(set(reasons)) == 3
    ids = [sample.record.id for sample in samples[4:]]
    assert len(set(ids)) == 4
    again = choose_samples([dataset], suspicions, 8, seed=0)
    assert [s.record.id for s in again] == [s.record.id for s in samples]


@pytest.mark.parametrize("count", [1, 4, 5, 100])
def test_there_are_no_more_samples_than_images(dataset: CocoDataset, count: int) -> None:
    assert len(choose_samples([dataset], [], count, seed=1)) == min(count, 5)


def test_a_file_in_two_splits_keeps_the_classes_of_each(tmp_path: Path) -> None:
    content = content_with_suspicions()
    train = CocoDataset(write_folder(tmp_path, content))
    content["categories"].pop(0)
    val = CocoDataset(write_folder(tmp_path, content))
    samples = choose_samples([train, val], suspicious_annotations(train.records), 8, seed=0)
    assert all(s.categories == train.categories for s in samples if s.suspicion)


def test_everything_can_be_drawn(tmp_path: Path) -> None:
    """Names that are formulas for Matplotlib or not UTF-8, damaged files, huge coordinates."""
    content = content_with_suspicions()
    outline = [-1500, 20, 1500, 20, 1500, 1500]
    content["annotations"].append(
        annotation(77, 11, bbox=[-1e308, 20, 1.5e308, 40], segmentation=[outline])
    )
    dataset = CocoDataset(write_folder(tmp_path, content))
    listed = dataset.records[1]
    damaged = replace(listed, path=listed.path.with_name("photo\udce9.jpg"))
    dataset.records = (dataset.records[0], damaged, *dataset.records[2:])
    damaged.path.write_bytes(b"no picture")
    suspicions = [
        *suspicious_annotations(dataset.records),
        Suspicion("invalid image file", damaged, detail="the data is not a JPEG $"),
    ]
    path = tmp_path / "new" / "samples.png"
    draw_samples(choose_samples([dataset], suspicions, 12, seed=0), path)
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    reddish = (pixels[..., 0] > 240) & (pixels[..., 1:].max(axis=-1) < 15)
    assert reddish.any()


def test_masks_are_drawn_in_the_right_pixels(dataset: CocoDataset, tmp_path: Path) -> None:
    """The square of image 5 changes its own pixels and no others."""
    record = next(r for r in dataset.records if r.id == 5)
    Image.new("RGB", (record.width, record.height), BACKGROUND).save(
        record.path.with_suffix(".png")
    )
    record.path.write_bytes(record.path.with_suffix(".png").read_bytes())
    draw_samples([GridSample(record, dataset.categories)], tmp_path / "samples.png")
    with Image.open(tmp_path / "samples.png") as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    rows, columns = np.nonzero((pixels == BACKGROUND).all(axis=-1))
    top, left = rows.min(), columns.min()
    scale = (columns.max() + 1 - left) / record.width
    height = rows.max() + 1 - top
    assert height / scale == pytest.approx(record.height, abs=1)
    colours = {
        place: tuple(pixels[int(top + y * scale), int(left + x * scale)])
        for place, (x, y) in {"inside": (25, 50), "outside": (5, 50), "below": (25, 70)}.items()
    }
    assert colours["outside"] == colours["below"] == BACKGROUND
    assert np.abs(np.subtract(colours["inside"], BACKGROUND)).max() > 40
