"""The benchmark in bulk of the tiny model, through the command that users type."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from maskrcnn_trt.benchmarks.bulk import BulkResult
from maskrcnn_trt.benchmarks.bulk_images import photo_like_jpegs
from maskrcnn_trt.benchmarks.bulk_record import goal_sentences, write_record
from maskrcnn_trt.benchmarks.commands import bench
from maskrcnn_trt.benchmarks.images import noise_jpeg
from maskrcnn_trt.benchmarks.report import Report
from maskrcnn_trt.export.bundle import bundle_from_checkpoint
from maskrcnn_trt.model.images import decode_image, read_header
from maskrcnn_trt.model.spec import ShapeBucket


def made_up(batch: int, rate: float, device: str = "cuda") -> BulkResult:
    steps = {"images": 2.0, "model": 10.0, "masks": 1.0, "strings": 4.0}
    return BulkResult("torch", "fp16", device, batch, rate, 800.0, steps, 37.5)


def test_bundle_is_measured_by_step_and_as_a_whole(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, size in (("a", (50, 40)), ("b", (40, 60)), ("c", (40, 64))):
        (folder / f"{name}.jpg").write_bytes(noise_jpeg(ShapeBucket(*size)))
    record = tmp_path / "record"
    options = ("--images", folder, "--batch", 1, "--batch", 2, "--seconds", 0.05)
    words = ["bulk", bundle, *options, "--json", tmp_path / "bulk.json", "--output", record]
    result = CliRunner().invoke(bench, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "bulk.json").read_text())["results"]
    assert [(r["engine"], r["precision"], r["batch"]) for r in found] == [
        ("onnxruntime", "fp32", 1),
        ("onnxruntime", "fp32", 2),
    ]
    for r in found:
        assert set(r["step_milliseconds"]) == {"images", "model", "masks"}
        assert min(r["step_milliseconds"].values()) > 0
        assert 0 < r["detections_per_image"] <= 20
        assert r["images_per_second"] > 0
    (page,) = record.glob("bulk-*.md")
    assert f"Images are 3 files of {folder}" in page.read_text().replace("\n", " ")
    with Image.open(page.with_suffix(".png")) as picture:
        assert picture.width > 400


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--precision", "fp16"], "the bundle has no fp16 onnx artefact, only fp32 onnx"),
        (["--images", "broken"], "the data is no JPEG, PNG or WebP image"),
    ],
)
def test_what_cannot_be_measured_is_named(
    bundle: Path, tmp_path: Path, words: list[str], sentence: str
) -> None:
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(b"no image")
    words = [str(broken) if word == "broken" else word for word in words]
    result = CliRunner().invoke(bench, ["bulk", str(bundle), "--seconds", "0.05", *words])
    assert result.exit_code != 0
    assert sentence in f"{result.output} {result.exception}"


def test_of_the_drawn_images_those_are_taken_that_fit(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "landscapes"
    bundle_from_checkpoint(
        tiny_checkpoint, path, precisions=("fp32",), buckets=(ShapeBucket(96, 160),)
    )
    result = CliRunner().invoke(bench, ["bulk", str(path), "--batch", "1", "--seconds", "0.05"])
    assert result.exit_code == 0, result.output


def test_goals_are_those_of_gpus() -> None:
    met, missed = goal_sentences([made_up(8, 600.0), made_up(1, 200.0), made_up(8, 9.0, "cpu")])
    assert met == "Batch 8 in fp16: 600 images/s, 75% of the engine's own; the bar of 70% is met."
    assert missed.endswith("25% of the engine's own; the bar of 70% is missed.")


def test_record_holds_every_number(tmp_path: Path) -> None:
    results = [made_up(1, 200.0), made_up(8, 600.0)]
    page = write_record(Report(results), results, "pictures", tmp_path).read_text()
    assert "| 8 | 600.0 | 800.0 | 75.0% | 37.5 |" in page
    assert "| 8 | 2.00 | 10.00 | 1.00 | 4.00 |" in page


def test_drawn_pictures_are_like_cocos() -> None:
    pictures = photo_like_jpegs()
    sizes = [read_header(data).size for data in pictures]
    assert (sizes.count((480, 640)), sizes.count((640, 480))) == (12, 4)
    assert all(read_header(data).is_plain_jpeg for data in pictures)
    assert 120_000 < sum(map(len, pictures)) / len(pictures) < 180_000
    assert decode_image(pictures[0]).std() > 20
