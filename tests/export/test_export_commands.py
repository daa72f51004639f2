import importlib.util
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import invoke
from PIL import Image
from tensorrt_stubs import load_tensorrt

from maskrcnn_trt.export import commands
from maskrcnn_trt.export.errors import EngineError
from maskrcnn_trt.model.bundle.manifest import BundleError, read_manifest, verified_path
from maskrcnn_trt.model.checkpoint import CheckpointError
from maskrcnn_trt.model.image_limits import ImageError

export = partial(invoke, commands.export)


@pytest.mark.slow
@pytest.mark.usefixtures("reused_exports")
def test_export_writes_and_verifies_the_requested_files(
    strict_checkpoint: Path, tmp_path: Path
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    (images / "notes.txt").touch()
    for seed in range(3):
        pixels = np.random.default_rng(seed).integers(0, 256, (90, 150, 3), np.uint8)
        Image.fromarray(pixels).save(images / f"{seed}.PNG")
    bundle = tmp_path / "new" / "bundle"
    result = export(
        strict_checkpoint, "-o", bundle, "--precision", "fp32", "--shape", "96x160",
        "--input-dtype", "float32", "--engine", "torch", "--verify", images,
        "--triton-repository", tmp_path / "models",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert f"the bundle is {bundle}" in result.output  # `doctor --tensorrt` expects this
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
    ("arguments", "facts"),
    [(["--shape", "0x160"], ["0x160", "multiple of 32"]),
     (["--input-dtype", "int8"], ["'int8'", "'uint8', 'float32'"]),
     (["--engine", "onnx"], ["'onnx'", "'torch', 'tensorrt', 'tensorrt-rtx'"]),
     (["--workspace", "1"], ["--workspace", "--engine tensorrt or --engine tensorrt-rtx"]),
     (["--build-log", "x"], ["--build-log", "--engine tensorrt or --engine tensorrt-rtx"]),
     (["--engine", "tensorrt-rtx", "--no-plugins"], ["--no-plugins has", "--engine tensorrt"]),
     (["--engine", "tensorrt-rtx", "--plugins"], ["--plugins has", "--engine tensorrt"]),
     (["--engine", "tensorrt-rtx", "--timing-cache", "x"], ["--timing-cache", "--engine tens"]),
     (["--engine", "tensorrt", "--compute-capability", "8.9"], ["--engine tensorrt-rtx"]),
     (["--compute-capability", "89"], ["'89'", "8.9"]), (["--batch", "0"], ["--batch", "x>=1"]),
     (["--precision", "fp32", "int4"], ["(int4)", "'fp32', 'tf32', 'fp16'"])],
)  # fmt: skip
def test_invalid_options_are_usage_errors(
    tiny_checkpoint: Path, tmp_path: Path, arguments: list[str], facts: list[str]
) -> None:
    """`test_cli_messages.py` has further messages."""
    result = export(tiny_checkpoint, "-o", tmp_path / "bundle", *arguments)
    assert result.exit_code == 2
    assert all(fact in result.output for fact in facts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"not a checkpoint"])
def test_unreadable_checkpoint_raises(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weights.pth"
    path.write_bytes(content)
    result = export(path, "-o", tmp_path / "bundle")
    assert isinstance(result.exception, CheckpointError)
    assert str(path) in str(result.exception)
    assert not (tmp_path / "bundle").exists()


def test_folders_with_other_files_are_kept(
    tiny_checkpoint: Path, bundle: Path, tmp_path: Path
) -> None:
    older = shutil.copytree(bundle, tmp_path / "bundle")
    (tmp_path / "mine").mkdir()
    for folder in (older, tmp_path / "mine"):
        (folder / "thesis.tex").write_text("years of work")
        result = export(tiny_checkpoint, "-o", folder)
        assert isinstance(result.exception, BundleError)
        assert all(name in str(result.exception) for name in (str(folder), "thesis.tex"))
        assert (folder / "thesis.tex").read_text() == "years of work"


def test_terminated_export_leaves_nothing(tiny_checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "maskrcnn_trt", "export", str(tiny_checkpoint), "-o", "bundle"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"exporting to ONNX in fp32")
        process.terminate()
    assert process.returncode == 143
    assert list(tmp_path.iterdir()) == []


def test_bf16_engines_need_their_weights(tiny_checkpoint: Path, tmp_path: Path) -> None:
    options = ("--engine", "tensorrt", "--strip-weights", "--precision", "bf16")
    result = export(tiny_checkpoint, "-o", tmp_path / "bundle", *options)
    assert result.exit_code == 2
    assert "no ONNX file for the precision bf16; leave out --strip-weights" in result.output


@pytest.mark.parametrize(
    ("options", "fact"),
    [(("--engine", "tensorrt", "--build-log", "bundle/x/file"), "--build-log {}/bundle/x/file"),
     (("--engine", "tensorrt", "--timing-cache", "bundle/x"), "--timing-cache {}/bundle/x"),
     (("--triton-repository", "bundle"), "--triton-repository {}/bundle"),
     (("--triton-repository", "bundle/models"), "--triton-repository {}/bundle/models"),
     (("--engine", "tensorrt", "--timing-cache", "file/x"), "{}/file (Not a directory)"),
     (("--verify", "empty"), "{}/empty"), (("--verify", "missing"), "{}/missing"),
     (("--samples", "empty"), "{}/empty"), (("--samples", "file"), "{}/file"),
     (("--precision", "int8", "--calibration", "empty"), "{}/empty")],
)  # fmt: skip
def test_unusable_paths_are_errors_before_the_export(
    tiny_checkpoint: Path, tmp_path: Path, options: tuple[str, ...], fact: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    words, path = options[:-1], tmp_path / options[-1]
    result = export(tiny_checkpoint, "-o", tmp_path / "bundle", *words, path)
    assert result.exit_code == 2
    assert fact.format(tmp_path) in result.output
    assert {path.name for path in tmp_path.iterdir()} == {"file", "empty"}


def test_damaged_images_are_errors_before_the_export(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.jpg").write_bytes(b"not an image")
    result = export(tiny_checkpoint, "-o", tmp_path / "bundle", "--verify", tmp_path / "images")
    assert isinstance(result.exception, ImageError)
    assert "images/a.jpg" in str(result.exception)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.usefixtures("quick_graphs")
def test_images_may_be_in_subfolders_only(tiny_checkpoint: Path, tmp_path: Path) -> None:
    image = tmp_path / "images" / "monday" / "street.png"
    image.parent.mkdir(parents=True)
    Image.new("RGB", (16, 16)).save(image)
    options = ("--shape", "96x160", "--samples", tmp_path / "images")
    assert export(tiny_checkpoint, "-o", tmp_path / "bundle", *options).exit_code == 0
    assert (tmp_path / "bundle" / "samples" / "street.png").is_file()


@pytest.mark.parametrize(
    ("options", "facts"),
    [(("--engine", "torch", "--precision", "int8", "--calibration", "a.png"), ["int8", "--engine"]),
     (("--precision", "fp16", "--calibration", "a.png"), ["fp16", "--calibration", "int8"])],
)  # fmt: skip
def test_options_without_effect_are_errors(
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    facts: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (8, 8)).save("a.png")
    result = export(tiny_checkpoint, "-o", "bundle", *options)
    assert isinstance(result.exception, BundleError)
    assert all(fact in str(result.exception) for fact in facts)
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="needs the wheel tensorrt-rtx"
)


@needs_rtx
@pytest.mark.slow
@pytest.mark.usefixtures("reused_exports")
def test_engines_are_written_beside_their_onnx_files(
    tiny_checkpoint: Path, half_bundle: Path, tmp_path: Path
) -> None:
    """The export adds to an older bundle, checks the engines' types, and verifies on noise."""
    bundle = shutil.copytree(half_bundle, tmp_path / "bundle")
    result = export(
        "--engine", "tensorrt-rtx", "--precision", "fp32", "tf32", "--batch", "4", "1",
        "--shape", "96x160", "--compute-capability", "8.9", "12.0", "--strict", "--verify",
        "-o", bundle, "--", tiny_checkpoint,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.output.count("passed") == 3
    manifest = read_manifest(bundle)
    half, single, tf32, *engines = manifest.artifacts
    assert (half,) == read_manifest(half_bundle).artifacts
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
        "manifest.json", half.path, "model-fp32-96x160.onnx", *(e.path for e in engines),
    }  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "bundle.build.log"}


@pytest.mark.slow
@needs_rtx
@pytest.mark.usefixtures("reused_exports")
def test_failed_engine_build_keeps_the_older_bundle(
    tiny_checkpoint: Path, bundle: Path, tmp_path: Path
) -> None:
    older = shutil.copytree(bundle, tmp_path / "bundle")
    log = tmp_path / "logs" / "build.log"
    result = export(
        tiny_checkpoint, "-o", older, "--precision", "fp16", "--shape", "96x160",
        "--engine", "tensorrt-rtx", "--compute-capability", "8.9", "--batch", "8",
        "--workspace", "0.000001", "--build-log", log,
    )  # fmt: skip
    assert isinstance(result.exception, EngineError)
    message = str(result.exception)
    for fact in ("model-fp16-96x160.rtx", "OutOfMemory", "--workspace"):
        assert fact in message
    assert "\n" not in message
    assert "OutOfMemory" in log.read_text()
    for artifact in read_manifest(older).artifacts:
        assert verified_path(older, artifact).is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "logs"}


def test_missing_tensorrt_is_an_error_before_the_export(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    result = export(tiny_checkpoint, "-o", tmp_path / "bundle", "--engine", "tensorrt")
    assert isinstance(result.exception, ModuleNotFoundError)
    assert result.exception.name == "tensorrt"
    assert result.output == ""


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        pytest.param(
            ("--engine", "tensorrt-rtx", "--compute-capability", "9.0"), "not 9.0", marks=needs_rtx
        ),
        pytest.param(
            ("--engine", "tensorrt"),
            "--engine tensorrt-rtx",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here"),
        ),
    ],
)
def test_unsupported_gpu_is_an_error_before_the_export(
    tiny_checkpoint: Path, tmp_path: Path, options: tuple[str, ...], fact: str
) -> None:
    load_tensorrt()
    result = export(tiny_checkpoint, "-o", tmp_path / "bundle", *options)
    assert isinstance(result.exception, EngineError)
    assert fact in str(result.exception)
    assert "exporting" not in result.output
