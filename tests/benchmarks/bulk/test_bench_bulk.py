"""`bench bulk` of the tiny model."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from maskrcnn_trt.benchmarks.bulk import bulk, bulk_goals, bulk_record
from maskrcnn_trt.benchmarks.bulk.measure import BulkResult
from maskrcnn_trt.benchmarks.common.images import noise_jpeg, photo_like_jpegs
from maskrcnn_trt.benchmarks.common.record import write_record
from maskrcnn_trt.model.bundle.manifest import read_manifest, write_manifest
from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.model.image_decoding import decode_image, read_header


def make_result(batch: int, rate: float, device: str = "cuda") -> BulkResult:
    steps = {"decode": 2.0, "model": 10.0, "paste": 1.0, "select": 4.0}
    return BulkResult("torch", "fp16", device, batch, rate, 800.0, steps, 37.5)


def test_bundle_is_measured_in_total_and_by_step(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for name, size in (("a", (50, 40)), ("b", (40, 60)), ("c", (40, 64))):
        (folder / f"{name}.jpg").write_bytes(noise_jpeg(ShapeBucket(*size)))
    output = tmp_path / "record"
    options = ("--images", folder, "--batch", 1, "--batch", 2, "--seconds", 0.05)
    args = [bundle, *options, "--json", tmp_path / "bulk.json", "--output", output]
    result = CliRunner().invoke(bulk, [str(arg) for arg in args])
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "bulk.json").read_text())["results"]
    assert [(r["engine"], r["precision"], r["batch"]) for r in results] == [
        ("onnxruntime", "fp32", 1),
        ("onnxruntime", "fp32", 2),
    ]
    for r in results:
        assert set(r["step_milliseconds"]) == {"decode", "model", "encode"}
        assert min(r["step_milliseconds"].values()) > 0
        assert 0 < r["detections_per_image"] <= 20
        assert r["images_per_second"] > 0
    (page,) = output.glob("bulk-*.md")
    assert f"3 files (`--images {folder}`)" in page.read_text().replace("\n", " ")
    with Image.open(page.with_suffix(".png")) as image:
        assert image.width > 400


@pytest.mark.parametrize(
    ("options", "fact"),
    [(["--precision", "fp16"], "no fp16 onnx"), (["--images", "IMAGE"], "broken.jpg: ")],
)
def test_invalid_input_is_an_error(
    bundle: Path, tmp_path: Path, options: list[str], fact: str
) -> None:
    image = tmp_path / "broken.jpg"
    image.write_bytes(noise_jpeg(ShapeBucket(50, 40))[:500])
    options = [str(image) if option == "IMAGE" else option for option in options]
    result = CliRunner().invoke(bulk, [str(bundle), "--seconds", "0.05", *options])
    assert result.exit_code != 0
    assert fact in f"{result.output} {result.exception}"


def test_default_images_are_those_that_fit(bundle: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(bundle, tmp_path / "landscapes")
    manifest = read_manifest(folder)
    landscapes = [a for a in manifest.artifacts if a.bucket == ShapeBucket(96, 160)]
    write_manifest(folder, manifest.model_copy(update={"artifacts": tuple(landscapes)}))
    result = CliRunner().invoke(bulk, [str(folder), "--batch", "1", "--seconds", "0.05"])
    assert result.exit_code == 0, result.output


def test_page_has_all_numbers_and_goals_of_gpus(tmp_path: Path) -> None:
    results = [make_result(8, 600.0), make_result(1, 200.0), make_result(8, 9.0, "cpu")]
    met, missed = bulk_goals(results)
    assert "75%" in met
    assert "70% is met" in met
    assert "25%" in missed
    assert "70% is missed" in missed
    page = write_record(bulk_record(results[:2], "some images"), tmp_path).read_text()
    assert "| 8 | 600.0 | 800.0 | 75.0% | 37.5 |" in page
    assert "| 8 | 2.00 | 10.00 | 1.00 | 4.00 |" in page


def test_photo_like_jpegs_resemble_coco() -> None:
    images = photo_like_jpegs()
    sizes = [read_header(data).size for data in images]
    assert (sizes.count((480, 640)), sizes.count((640, 480))) == (12, 4)
    assert all(read_header(data).is_plain_jpeg for data in images)
    assert 120_000 < sum(map(len, images)) / len(images) < 180_000
    assert decode_image(images[0]).std() > 20
