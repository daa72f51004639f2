import importlib.util
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image
from tensorrt_stubs import load_tensorrt

from maskrcnn_trt.export import commands
from maskrcnn_trt.export.errors import EngineError
from maskrcnn_trt.model.checkpoint import CheckpointError
from maskrcnn_trt.model.manifest import BundleError, read_manifest, verified_path


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
        "--input-dtype", "float32", "--engine", "torch", "--verify", pictures,
        "--triton-repository", tmp_path / "models",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert f"the bundle is {bundle}" in result.output
    rows = [line.split() for line in result.output.splitlines() if "passed" in line]
    assert [row[:4] for row in rows] == [[k, "fp32", "96x160", "3"] for k in ("onnx", "torch")]
    artifacts = read_manifest(bundle).artifacts
    assert [artifact.kind for artifact in artifacts] == ["onnx", "torch"]
    for artifact in artifacts:
        assert (artifact.precision, str(artifact.bucket)) == ("fp32", "96x160")
        assert artifact.input_dtype == "float32"
    names = {name for artifact in artifacts for name in artifact.paths}
    assert {path.name for path in bundle.iterdir()} == {"manifest.json", *names}
    assert [path.name for path in bundle.parent.iterdir()] == ["bundle"]
    (model,) = (tmp_path / "models").iterdir()
    assert model.name.endswith("-fp32-96x160-onnx")
    assert model.name in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--shape", "big"], "'big' is not of the form HEIGHTxWIDTH, as in 800x1344"),
        (["--shape", "100x160"], "100x160 must be a multiple of 32 pixels on both sides"),
        (["--shape", "0x160"], "0x160 must be a multiple of 32 pixels on both sides"),
        (["--precision", "int8"], "'int8' is not one of 'fp32', 'tf32', 'fp16'"),
        (["--input-dtype", "int8"], "'int8' is not one of 'uint8', 'float32'"),
        (["--engine", "onnx"], "'onnx' is not one of 'torch', 'tensorrt', 'tensorrt-rtx'"),
        (["--batch", "1", "8"], "--batch is of no use without --engine tensorrt or --engine tens"),
        (["--workspace", "1"], "--workspace is of no use without --engine tensorrt or --engine"),
        (["--build-log", "x"], "--build-log is of no use without --engine tensorrt or --engine"),
        (["--engine", "tensorrt-rtx", "--no-plugins"], "--plugins is of no use without --engine t"),
        (["--engine", "tensorrt-rtx", "--timing-cache", "x"], "--timing-cache is of no use witho"),
        (["--engine", "tensorrt", "--compute-capability", "8.9"], "without --engine tensorrt-rtx"),
        (["--compute-capability", "89"], "'89' is no compute capability such as 8.9"),
        (["--batch", "0"], "0 is not in the range x>=1"),
        (["--precision", "fp32", "int8"], "extra argument (int8), as 'int8' is not one of 'fp32'"),
    ],
)
def test_wrong_options_are_named(
    tiny_checkpoint: Path, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    result = export(tiny_checkpoint, "-o", tmp_path / "bundle", *arguments)
    assert result.exit_code == 2
    assert sentence in result.output
    assert list(tmp_path.iterdir()) == []


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
    assert f"{tmp_path} holds something else than a bundle, thesis.tex" in str(result.exception)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["years of work"]


def test_bundle_with_something_else_in_it_is_left_alone(
    tiny_checkpoint: Path, bundle: Path, tmp_path: Path
) -> None:
    older = shutil.copytree(bundle, tmp_path / "bundle")
    checkpoint = Path(shutil.copy(tiny_checkpoint, older / "model.pth"))
    result = export(checkpoint, "-o", older)
    assert isinstance(result.exception, BundleError)
    assert "holds something else than a bundle, model.pth" in str(result.exception)
    assert checkpoint.is_file()


@pytest.mark.parametrize("option", ["--build-log", "--timing-cache"])
def test_files_within_the_bundle_would_be_lost_with_it(
    tiny_checkpoint: Path, tmp_path: Path, option: str
) -> None:
    bundle = tmp_path / "bundle"
    result = export(
        tiny_checkpoint, "-o", bundle, "--engine", "tensorrt", option, bundle / "x" / "file"
    )
    assert result.exit_code == 2
    assert f"{option} {bundle}/x/file is in the bundle, which is replaced" in result.output
    assert list(tmp_path.iterdir()) == []


def test_timing_cache_that_cannot_be_written_is_refused_before_the_export(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "timing.cache"
    result = export(
        tiny_checkpoint, "-o", tmp_path / "bundle", "--engine", "tensorrt", "--timing-cache", cache
    )
    assert result.exit_code == 2
    assert f"no file can be made in {tmp_path}/file (File exists); choose an" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


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


needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="needs the wheel tensorrt-rtx"
)


@needs_rtx
@pytest.mark.slow
def test_engines_stand_beside_the_files_that_they_were_built_from(
    tiny_checkpoint: Path, half_bundle: Path, tmp_path: Path
) -> None:
    """In the place of an older bundle, and the files verified on noise."""
    bundle = shutil.copytree(half_bundle, tmp_path / "bundle")
    result = export(
        "--engine", "tensorrt-rtx", "--precision", "fp32", "tf32", "--batch", "4", "1",
        "--shape", "96x160", "--compute-capability", "8.9", "12.0", "--verify",
        "-o", bundle, "--", tiny_checkpoint,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.output.count("passed") == 2
    manifest = read_manifest(bundle)
    single, tf32, *engines = manifest.artifacts
    assert (single.kind, single.precision) == ("onnx", "fp32")
    assert tf32 == single.model_copy(update={"precision": "tf32"})
    assert [(e.kind, e.precision, e.path) for e in engines] == [
        ("tensorrt-rtx", "fp32", "model-fp32-96x160.rtx"),
        ("tensorrt-rtx", "tf32", "model-tf32-96x160.rtx"),
    ]
    for engine in engines:
        assert verified_path(bundle, engine).is_file()
        assert engine.engine is not None
        assert engine.engine.compute_capabilities == ("8.9", "12.0")
        assert [(p.min, p.max) for p in engine.engine.profiles] == [(1, 1), (2, 4)]
    assert {path.name for path in bundle.iterdir()} == {
        "manifest.json", "model-fp32-96x160.onnx", *(engine.path for engine in engines),
    }  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "bundle.build.log"}


@needs_rtx
def test_older_bundle_stays_where_an_engine_cannot_be_built(
    tiny_checkpoint: Path, bundle: Path, tmp_path: Path
) -> None:
    """Turing lacks what the function bodies need."""
    older = shutil.copytree(bundle, tmp_path / "bundle")
    log = tmp_path / "logs" / "build.log"
    result = export(
        tiny_checkpoint, "-o", older, "--precision", "fp16", "--shape", "96x160",
        "--engine", "tensorrt-rtx", "--compute-capability", "7.5", "--build-log", log,
    )  # fmt: skip
    assert isinstance(result.exception, EngineError)
    assert str(log) in str(result.exception)
    assert "FP32 GEMM is not supported" in log.read_text()
    for artifact in read_manifest(older).artifacts:
        assert verified_path(older, artifact).is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "logs"}


@needs_rtx
def test_gpu_without_support_is_refused_before_the_export(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    result = export(
        tiny_checkpoint, "-o", tmp_path / "bundle", "--engine", "tensorrt-rtx",
        "--compute-capability", "9.0",
    )  # fmt: skip
    assert isinstance(result.exception, EngineError)
    assert "exporting" not in result.output


def test_tensorrt_that_is_missing_is_found_so_before_the_export(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    result = export(tiny_checkpoint, "-o", tmp_path / "bundle", "--engine", "tensorrt")
    assert isinstance(result.exception, ModuleNotFoundError)
    assert result.exception.name == "tensorrt"
    assert result.output == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_tensorrt_without_a_gpu_is_refused_before_the_export(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    load_tensorrt()
    result = export(tiny_checkpoint, "-o", tmp_path / "bundle", "--engine", "tensorrt")
    assert isinstance(result.exception, EngineError)
    assert "--engine tensorrt-rtx, which needs no GPU" in str(result.exception)
    assert result.output == ""
