"""What is chosen to be shown, and that every kind of sample can be drawn."""

from pathlib import Path

import numpy as np
import pytest
from coco_folder import annotation, sound_content, write_folder
from PIL import Image

from maskrcnn_trt.training.data.annotation_checks import Suspicion, suspicious_annotations
from maskrcnn_trt.training.data.coco import CocoDataset
from maskrcnn_trt.training.data.inspection_picture import Sample, choose_samples, draw_samples

GROUND = (0, 30, 90)


@pytest.fixture
def dataset(tmp_path: Path) -> CocoDataset:
    content = sound_content()
    # text that matplotlib would take for a formula
    content["categories"][1]["name"] = "$\\frac{$"
    content["annotations"] += [annotation(n, 11) for n in (70, 71, 72, 73)]
    content["annotations"].append(annotation(74, 2, bbox=[-40, 20, 300, 40]))
    return CocoDataset(write_folder(tmp_path, content))


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


def test_everything_can_be_drawn(dataset: CocoDataset, tmp_path: Path) -> None:
    damaged = dataset.records[1]
    damaged.path.write_bytes(b"no picture")
    suspicions = [
        *suspicious_annotations(dataset.records),
        Suspicion("file that cannot be used", damaged, detail="the data is no JPEG $"),
    ]
    picture = tmp_path / "new" / "samples.png"
    draw_samples(choose_samples([dataset], suspicions, 12, seed=0), picture)
    with Image.open(picture) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    reddish = (pixels[..., 0] > 240) & (pixels[..., 1:].max(axis=-1) < 15)
    assert reddish.any()


def test_a_picture_shows_the_masks_where_they_are(dataset: CocoDataset, tmp_path: Path) -> None:
    """The square of image 5 changes its pixels, and none beyond it."""
    record = next(r for r in dataset.records if r.id == 5)
    Image.new("RGB", (record.width, record.height), GROUND).save(record.path.with_suffix(".png"))
    record.path.write_bytes(record.path.with_suffix(".png").read_bytes())
    draw_samples([Sample(record, dataset.categories)], tmp_path / "samples.png")
    with Image.open(tmp_path / "samples.png") as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    rows, columns = np.nonzero((pixels == GROUND).all(axis=-1))
    top, left = rows.min(), columns.min()
    scale = (columns.max() + 1 - left) / record.width
    height = rows.max() + 1 - top
    assert height / scale == pytest.approx(record.height, abs=1)
    colours = {
        place: tuple(pixels[int(top + y * scale), int(left + x * scale)])
        for place, (x, y) in {"inside": (25, 50), "outside": (5, 50), "below": (25, 70)}.items()
    }
    assert colours["outside"] == colours["below"] == GROUND
    assert np.abs(np.subtract(colours["inside"], GROUND)).max() > 40


def test_absurd_coordinates_are_drawn_without_complaint(tmp_path: Path) -> None:
    content = sound_content()
    outline = [-1e200, 20, 1e200, 20, 1e200, 1e200]
    absurd = annotation(77, 11, bbox=[-1e308, 20, 1.5e308, 40], segmentation=[outline])
    content["annotations"].append(absurd)
    dataset = CocoDataset(write_folder(tmp_path, content))
    suspicions = suspicious_annotations(dataset.records)
    draw_samples(choose_samples([dataset], suspicions, 8, seed=0), tmp_path / "samples.png")
    assert (tmp_path / "samples.png").stat().st_size > 1000
