"""Image files that are listed twice, duplicated, unlisted or damaged."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from coco_folder import HEIGHT, WIDTH, valid_content, write_folder, write_image
from PIL import ExifTags, Image

from maskrcnn_trt.training.data.coco.dataset import CocoDataset, ImageRecord
from maskrcnn_trt.training.data.inspect.file_checks import (
    misfit_files,
    read_headers,
    rotated_files,
    suspicious_files,
    undecodable_files,
    unlisted_files,
)


@pytest.fixture
def records(tmp_path: Path) -> tuple[ImageRecord, ...]:
    return CocoDataset(write_folder(tmp_path, valid_content())).records


def test_valid_files_are_not_suspicious(tmp_path: Path, records: tuple[ImageRecord, ...]) -> None:
    assert suspicious_files(records) == []
    assert undecodable_files(records) == []
    assert misfit_files(records, read_headers(records)) == []
    assert unlisted_files([tmp_path], [record.path for record in records]) == []


def test_copies_and_second_listings_are_found(
    tmp_path: Path, records: tuple[ImageRecord, ...]
) -> None:
    (tmp_path / "9.jpg").write_bytes((tmp_path / "5.jpg").read_bytes())
    # of equal size and with an equal end
    (tmp_path / "11.jpg").write_bytes(b"?" + (tmp_path / "5.jpg").read_bytes()[1:])
    found = suspicious_files([*records, replace(records[0])])
    assert [(s.subject, s.reason) for s in found] == [
        (f"{tmp_path / '2.png'}", "file listed more than once"),
        (f"{tmp_path / '9.jpg'}: as {tmp_path / '5.jpg'}", "file with the content of another"),
    ]
    for number, record in enumerate(records):
        record.path.write_bytes(bytes([number % 3]) + bytes(10_000))
    copies = [(records[3], records[0]), (records[4], records[1])]
    assert [s.subject for s in suspicious_files(records)] == [
        f"{copy.path}: as {first.path}" for copy, first in copies
    ]


def test_files_that_cannot_be_decoded_are_named(
    tmp_path: Path, records: tuple[ImageRecord, ...]
) -> None:
    (tmp_path / "5.jpg").write_bytes((tmp_path / "5.jpg").read_bytes()[:300])
    write_image(tmp_path / "8.jpg", WIDTH + 8, HEIGHT)
    (tmp_path / "11.jpg").unlink()
    seen = []
    found = undecodable_files(records, lambda: seen.append(1))
    assert len(seen) == len(records)
    details = {s.record.path.name: s.detail for s in found}
    assert list(details) == ["5.jpg", "8.jpg", "11.jpg"]
    assert "truncated" in details["5.jpg"].lower()
    assert "168x128 pixels, but annotated as 128x160" in details["8.jpg"]
    assert details["11.jpg"] == "No such file or directory"
    assert suspicious_files(records) == []


def test_pipes_are_named_instead_of_read(tmp_path: Path, records: tuple[ImageRecord, ...]) -> None:
    for name in ("5.jpg", "8.jpg"):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
    assert suspicious_files(records) == []
    for found in (misfit_files(records, read_headers(records)), undecodable_files(records)):
        assert [s.record.path.name for s in found] == ["5.jpg", "8.jpg"]
        assert all("pipe" in s.detail for s in found)


def test_unlisted_images_are_found_at_any_depth(tmp_path: Path) -> None:
    for name in ("a.jpg", "b.JPEG", "c.txt", "deep/down/d.png", "deep/e.webp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = unlisted_files([tmp_path, tmp_path], [tmp_path / "a.jpg", tmp_path / "deep/e.webp"])
    assert found == [tmp_path / "b.JPEG", tmp_path / "deep/down/d.png"]


def test_headers_of_another_size_than_annotated_or_allowed_are_named(
    tmp_path: Path, records: tuple[ImageRecord, ...]
) -> None:
    for record in records[:3]:
        write_image(record.path, record.height - 3, record.width)
    # An image that is rotated when it is shown may be annotated in either orientation.
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    write_image(tmp_path / "9.jpg", WIDTH, HEIGHT, exif=exif)
    (tmp_path / "11.jpg").write_bytes(b"no image")
    thin = replace(records[0], path=tmp_path / "thin.png", height=7)
    Image.new("L", (thin.width, thin.height)).save(thin.path)
    records = (*records, thin)
    found = {s.record.path.name: s.detail for s in misfit_files(records, read_headers(records))}
    assert set(found) == {"2.png", "5.jpg", "8.jpg", "11.jpg", "thin.png"}
    assert found["5.jpg"] == f"{HEIGHT - 3}x{WIDTH} pixels, but annotated as {HEIGHT}x{WIDTH}"
    assert "not a JPEG" in found["11.jpg"]
    assert "at least 8 pixels" in found["thin.png"]
    assert found["thin.png"] == undecodable_files([thin])[0].detail


def test_orientations_are_reported_with_the_rule_that_training_uses(
    tmp_path: Path, records: tuple[ImageRecord, ...]
) -> None:
    exif = Image.Exif()
    for name, orientation, size in (
        ("5.jpg", 3, (HEIGHT, WIDTH)),
        ("8.jpg", 6, (HEIGHT, WIDTH)),
        ("9.jpg", 6, (WIDTH, HEIGHT)),
    ):
        exif[ExifTags.Base.Orientation] = orientation
        write_image(tmp_path / name, *size, exif=exif)
    found = rotated_files(records, read_headers(records))
    assert {s.record.path.name: s.reason.partition(": ")[2].split(",")[0] for s in found} == {
        "5.jpg": "applied unless data.exif_orientation=ignore",
        "8.jpg": "ignored",
        "9.jpg": "applied",
    }
