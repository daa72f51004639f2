import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command_line import invoke
from numpy.typing import NDArray
from PIL import Image

from maskrcnn_trt.serving.commands.client import client
from maskrcnn_trt.serving.commands.predict import predict

Encode = Callable[..., bytes]


@pytest.fixture
def folder(tmp_path: Path, picture: Encode) -> Path:
    """Create a folder with two images, one of them rotated by its EXIF data, and a text file."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "012.jpg").write_bytes(picture(1))
    exif = Image.Exif()
    exif[0x0112] = 6
    (folder / "cat.png").write_bytes(picture(2, codec="PNG", exif=exif))
    (folder / "notes.txt").write_text("no picture")
    return folder


def pixels_of(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as image:
        return np.array(image)


def test_client_and_predict_write_equal_files(
    bundle: Path, address: str, folder: Path, tmp_path: Path
) -> None:
    Image.fromarray(pixels_of(folder / "012.jpg")).save(folder / "scan.tiff")
    (folder / "film.gif").write_bytes(b"GIF89a")
    (folder / "._film.gif").touch()  # macOS writes such files
    outputs = tmp_path / "client", tmp_path / "predict"
    words = (folder, "--score-threshold", 0.2)
    for result in (
        invoke(client, address, *words, "-o", outputs[0]),
        invoke(predict, bundle, *words, "-o", outputs[1]),
    ):
        assert result.exit_code == 0, result.output
        assert "detections in 3 images" in result.stdout
        assert "1 image in unsupported formats (film.gif)" in result.stderr
        assert "notes.txt" not in result.stderr
    names = {path.name for path in outputs[0].iterdir()}
    assert names == {"012.png", "cat.png", "scan.png", "detections.json"}
    for name in names:
        assert (outputs[0] / name).read_bytes() == (outputs[1] / name).read_bytes()
    records = json.loads((outputs[0] / "detections.json").read_text())
    assert {record["image_id"] for record in records} == {12, "cat", "scan"}
    assert pixels_of(outputs[0] / "cat.png").shape == (200, 120, 3)
    drawn, source = pixels_of(outputs[0] / "012.png"), pixels_of(folder / "012.jpg")
    assert drawn.shape == source.shape
    assert (drawn != source).any()


def test_arrays_agree_with_the_coco_results(address: str, folder: Path, tmp_path: Path) -> None:
    coco_mask = pytest.importorskip("pycocotools.mask")
    formats = ("--format", "coco", "--format", "numpy")
    result = invoke(client, address, folder, "-o", tmp_path, "--score-threshold", 0.2, *formats)
    assert result.exit_code == 0, result.output
    assert not list(tmp_path.glob("*.png"))
    records = json.loads((tmp_path / "detections.json").read_text())
    for image_id, stem in ((12, "012"), ("cat", "cat")):
        own = [record for record in records if record["image_id"] == image_id]
        with np.load(tmp_path / f"{stem}.npz") as arrays:
            assert len(own) == len(arrays["scores"]) > 0
            assert arrays["masks"].shape == (len(own), *arrays["size"])
            assert arrays["class_names"].shape == arrays["labels"].shape == (len(own),)
            for index, record in enumerate(own):
                assert record["score"] == arrays["scores"][index]
                assert record["category_id"] == arrays["category_ids"][index]
                x, y, width, height = record["bbox"]
                corners = arrays["boxes"][index]
                np.testing.assert_allclose((x, y, x + width, y + height), corners, atol=1e-3)
                mask = coco_mask.decode(record["segmentation"])
                np.testing.assert_array_equal(mask != 0, arrays["masks"][index])


def test_arrays_without_detections_keep_their_shapes(
    address: str, folder: Path, tmp_path: Path
) -> None:
    words = ("-o", tmp_path, "--score-threshold", 1, "--format", "numpy")
    assert invoke(client, address, folder / "012.jpg", *words).exit_code == 0
    with np.load(tmp_path / "012.npz") as arrays:
        assert arrays["boxes"].shape == (0, 4)
        assert arrays["masks"].shape == (0, *arrays["size"])
        assert arrays["class_names"].shape == (0,)


def test_invalid_and_unreadable_files_do_not_affect_the_others(
    bundle: Path, address: str, folder: Path, tmp_path: Path
) -> None:
    (folder / "album.jpg").mkdir()
    (folder / "bad.jpg").write_bytes(b"no image")
    for name in ("gone.jpg", "gone2.jpg", "gone3.jpg"):
        (folder / name).symlink_to(tmp_path / "nowhere")
    for number, source in enumerate(((client, address), (predict, bundle))):
        output = tmp_path / str(number)
        result = invoke(*source, folder, "-o", output, "--score-threshold", 0.2)
        assert result.exit_code == 1
        reasons = {
            "album.jpg": "the file cannot be read (Is a directory)",
            "bad.jpg": "the data is not a JPEG, PNG, WebP, BMP or TIFF image",
            "gone.jpg": "the file cannot be read (No such file or directory)",
        }
        _, _, summary = result.stderr.partition("Error: ")
        first, *named, last = summary.splitlines()
        assert first == "5 of 7 images failed:"
        for line, (name, reason) in zip(named, reasons.items(), strict=True):
            assert line == f"  {folder / name}: {reason}"
            assert line.strip() in result.stderr.partition("Error: ")[0]
        assert last == "  and 2 more"
        assert "detections in 2 images" in result.stdout
        assert {path.name for path in output.glob("*.png")} == {"012.png", "cat.png"}
        results = json.loads((output / "detections.json").read_text())
        assert {record["image_id"] for record in results} == {12, "cat"}


def test_output_into_the_input_folder_is_rejected(
    bundle: Path, folder: Path, tmp_path: Path
) -> None:
    links = tmp_path / "links"
    links.mkdir()
    (links / "linked.jpg").symlink_to(folder / "012.jpg")
    for source, *words in (
        (predict, bundle, folder, "-o", folder),
        (client, "localhost:1", folder, "-o", folder / ".." / "pictures"),
        (client, "localhost:1", links, "-o", links),
        (client, "localhost:1", links, "-o", folder),
    ):
        result = invoke(source, *words)
        assert result.exit_code == 2
        assert "--output" in result.stderr
    assert {path.name for path in folder.iterdir()} == {"012.jpg", "cat.png", "notes.txt"}
    assert invoke(predict, bundle, folder, "-o", folder, "--format", "coco").exit_code == 0


def test_output_that_cannot_be_written_is_rejected_first(folder: Path, tmp_path: Path) -> None:
    """Nothing is exported before."""
    (tmp_path / "file").touch()
    # Root may write everywhere except in a virtual file system.
    for output in (tmp_path / "file" / "new", Path("/proc"), Path("/proc/a/b")):
        for source in ((predict, tmp_path / "no-such.pth"), (client, "localhost:1")):
            result = invoke(*source, folder, "-o", output)
            assert result.exit_code == 2
            assert str(output) in result.stderr
            assert "--output" in result.stderr


def test_manifest_stands_for_its_bundle(bundle: Path, folder: Path, tmp_path: Path) -> None:
    result = invoke(predict, bundle / "manifest.json", folder, "-o", tmp_path / "detections")
    assert result.exit_code == 0, result.output


def test_a_file_of_a_bundle_is_rejected(bundle: Path, folder: Path, tmp_path: Path) -> None:
    model = next(bundle.glob("*.onnx"))
    result = invoke(predict, model, folder, "-o", tmp_path / "detections")
    assert result.exit_code == 2
    assert "give the bundle" in result.output
    assert "manifest.json" in result.output


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("cat.jpg", {12: "012", "cat.jpg": "cat.jpg", "cat.png": "cat.png"}),
        ("12.jpg", {"012.jpg": "012.jpg", "12.jpg": "12.jpg", "cat": "cat"}),
    ],
)
def test_images_with_equal_ids_keep_their_suffixes(
    bundle: Path,
    folder: Path,
    picture: Encode,
    tmp_path: Path,
    name: str,
    ids: dict[int | str, str],
) -> None:
    (folder / name).write_bytes(picture())
    output = tmp_path / "detections"
    words = ("--format", "coco", "--format", "numpy", "--score-threshold", 0.2)
    assert invoke(predict, bundle, folder, "-o", output, *words).exit_code == 0
    records = json.loads((output / "detections.json").read_text())
    assert {record["image_id"] for record in records} == {*ids}
    assert {path.name for path in output.glob("*.npz")} == {f"{stem}.npz" for stem in ids.values()}


def test_images_of_one_name_are_rejected(
    bundle: Path, folder: Path, picture: Encode, tmp_path: Path
) -> None:
    (tmp_path / "cat.png").write_bytes(picture())
    result = invoke(predict, bundle, folder, tmp_path / "cat.png")
    assert result.exit_code == 2
    for fact in (folder / "cat.png", tmp_path / "cat.png", "image ID cat.png"):
        assert str(fact) in result.stderr


def test_output_addresses_require_ray(
    bundle: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for source in ((predict, bundle), (client, "localhost:1")):
        result = invoke(*source, folder, "-o", "s3://bucket/detections")
        assert result.exit_code == 2
        assert "s3://bucket/detections" in result.stderr
        assert "--ray" in result.stderr
    assert not list(tmp_path.glob("s3*"))


def test_folder_without_images_is_rejected(bundle: Path, tmp_path: Path) -> None:
    result = invoke(predict, bundle, tmp_path)
    assert result.exit_code == 2
    assert "no image found" in result.stderr
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "a.tif").touch()
    assert f"such as {tmp_path}/below/a.tif" in invoke(predict, bundle, tmp_path).stderr
    (tmp_path / "below" / "a.tif").rename(tmp_path / "b.tif")
    assert "such as" not in invoke(predict, bundle, tmp_path).stderr
