import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from maskrcnn_trt.export import commands
from maskrcnn_trt.model.checkpoint import CheckpointError
from maskrcnn_trt.model.manifest import BundleError, read_manifest


def export(*arguments: object) -> Result:
    return CliRunner().invoke(commands.export, list(map(str, arguments)))


def test_exports_what_is_asked_for_and_verifies_it(tiny_checkpoint: Path, tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "notes.txt").touch()
    for seed in range(3):
        pixels = np.random.default_rng(seed).integers(0, 256, (90, 150, 3), np.uint8)
        Image.fromarray(pixels).save(pictures / f"{seed}.PNG")
    bundle = tmp_path / "new" / "bundle"
    result = export(
        tiny_checkpoint, "-o", bundle, "--precision", "fp32", "--shape", "96x160",
        "--input-dtype", "float32", "--verify", pictures,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert f"the bundle is {bundle}" in result.output
    (row,) = (line for line in result.output.splitlines() if "passed" in line)
    assert row.split()[1:5] == ["fp32", "96x160", "│", "3"]
    manifest = read_manifest(bundle)
    (artifact,) = manifest.artifacts
    assert (artifact.precision, str(artifact.bucket)) == ("fp32", "96x160")
    assert artifact.input_dtype == "float32"
    assert {path.name for path in bundle.iterdir()} == {"manifest.json", artifact.path}
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]


def test_older_bundle_is_replaced_and_verified_on_noise(
    tiny_checkpoint: Path, bundle: Path, tmp_path: Path
) -> None:
    older = shutil.copytree(bundle, tmp_path / "bundle")
    result = export(
        tiny_checkpoint, "-o", older, "--precision", "fp16", "--shape", "96x160", "--verify"
    )
    assert result.exit_code == 0, result.output
    assert "passed" in result.output
    assert {path.name for path in older.iterdir()} == {"manifest.json", "model-fp16-96x160.onnx"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--shape", "big"], "'big' is not of the form HEIGHTxWIDTH, as in 800x1344"),
        (["--shape", "100x160"], "100x160 must be a multiple of 32 pixels on both sides"),
        (["--shape", "0x160"], "0x160 must be a multiple of 32 pixels on both sides"),
        (["--precision", "int8"], "'int8' is not one of 'fp32', 'tf32', 'fp16'"),
        (["--input-dtype", "int8"], "'int8' is not one of 'uint8', 'float32'"),
    ],
)
def test_wrong_options_are_named(
    tiny_checkpoint: Path, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    result = export(tiny_checkpoint, "-o", tmp_path / "bundle", *arguments)
    assert result.exit_code == 2
    assert sentence in result.output
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("content", [None, b"", b"not a checkpoint"])
def test_checkpoint_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "weights.pth"
    if content is not None:
        path.write_bytes(content)
    result = export(path, "-o", tmp_path / "bundle")
    assert isinstance(result.exception, CheckpointError)
    assert str(path) in str(result.exception)
    assert not (tmp_path / "bundle").exists()


def test_folder_that_holds_something_else_is_left_alone(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    result = export(tiny_checkpoint, "-o", tmp_path)
    assert isinstance(result.exception, BundleError)
    assert str(tmp_path) in str(result.exception)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["years of work"]


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_verify_without_pictures_is_refused_before_the_export(
    tiny_checkpoint: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    result = export(tiny_checkpoint, "-o", tmp_path / "bundle", "--verify", tmp_path / name)
    assert result.exit_code == 2
    assert f"{tmp_path / name} is no picture and no folder of pictures" in result.output
    assert not (tmp_path / "bundle").exists()
