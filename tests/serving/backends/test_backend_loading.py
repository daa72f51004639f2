import logging
import os
import re
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from maskrcnn_trt.model.bundle.manifest import (
    Artifact,
    BatchProfile,
    BundleError,
    EngineBuild,
    Precision,
    read_manifest,
    sha256_of,
    write_manifest,
)
from maskrcnn_trt.serving.backends.loading import load_backend, served_precision
from maskrcnn_trt.serving.backends.onnxruntime import OnnxRuntimeBackend
from maskrcnn_trt.serving.commands.predict import predict
from maskrcnn_trt.serving.commands.serve import serve
from maskrcnn_trt.serving.errors import BackendError

BACKENDS = "maskrcnn_trt.serving.backends"


@pytest.fixture
def without_driver_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine without pycuda and cuda-bindings, which cannot run plans."""
    for name in ("pycuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("pycuda_driver", "cuda_bindings_driver"):
        monkeypatch.delitem(sys.modules, f"{BACKENDS}.{name}", raising=False)


@pytest.fixture
def with_plans(bundle: Path, tmp_path: Path) -> Path:
    """Tiny bundle with additional files that its manifest lists as TensorRT-RTX plans."""
    manifest = read_manifest(bundle)
    plans = []
    for artifact in manifest.artifacts:
        os.link(bundle / artifact.path, tmp_path / artifact.path)
        path = tmp_path / f"{artifact.bucket}.rtx"
        path.write_bytes(b"no plan")
        plans += [_plan_of(artifact, path, precision) for precision in ("fp16", artifact.precision)]
    artifacts = (*manifest.artifacts, *plans)
    write_manifest(tmp_path, manifest.model_copy(update={"artifacts": artifacts}))
    return tmp_path


def _plan_of(artifact: Artifact, path: Path, precision: Precision) -> Artifact:
    build = EngineBuild(
        runtime_version="1.7",
        compute_capabilities=("8.9",),
        cuda_version="13",
        platform="linux-x86_64",
        plugins={},
        profiles=(BatchProfile(min=1, opt=8, max=8),),
    )
    changes: dict[str, Any] = {"path": path.name, "sha256": sha256_of(path), "engine": build}
    return artifact.model_copy(update=changes | {"kind": "tensorrt-rtx", "precision": precision})


def test_auto_logs_the_backend(bundle: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = read_manifest(bundle)
    with caplog.at_level(logging.INFO):
        backend = load_backend(bundle, manifest, "fp32")
    assert isinstance(backend, OnnxRuntimeBackend)
    (record,) = caplog.records
    assert record.message == f"using backend onnxruntime for {manifest.model_name}-fp32 ({bundle})"


@pytest.mark.usefixtures("without_driver_packages")
def test_auto_logs_why_faster_backends_are_skipped(
    with_plans: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = load_backend(with_plans, read_manifest(with_plans), "fp32")
    assert isinstance(backend, OnnxRuntimeBackend)
    (record,) = caplog.records
    for words in ("onnxruntime", "tensorrt-rtx: cuda-bindings", 'pip install "maskrcnn-trt[rtx]"'):
        assert words in record.getMessage()


def test_missing_onnxruntime_names_both_extras(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    for name in ("auto", "onnxruntime"):
        with pytest.raises(BackendError, match=r"\[cpu\].*\[gpu\]"):
            load_backend(bundle, read_manifest(bundle), "fp32", name)


def test_two_packages_of_onnxruntime(
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("onnxruntime", "onnxruntime-gpu"):
        folder = tmp_path / f"{name.replace('-', '_')}-1.31.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.31.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    load_backend(bundle, read_manifest(bundle), "fp32", "onnxruntime").close()
    assert "pip uninstall --yes onnxruntime onnxruntime-gpu" in caplog.text
    # An uninstalled one of them took the files of the other along.
    empty = ModuleType("onnxruntime")
    empty.__spec__ = ModuleSpec("onnxruntime", None)
    monkeypatch.setitem(sys.modules, "onnxruntime", empty)
    with pytest.raises(BackendError, match=r"files .* are missing.*pip uninstall"):
        load_backend(bundle, read_manifest(bundle), "fp32", "onnxruntime")


@pytest.mark.usefixtures("without_driver_packages")
def test_no_runnable_backend(with_plans: Path) -> None:
    manifest = read_manifest(with_plans)
    with pytest.raises(BackendError, match="tensorrt-rtx: cuda-bindings is not installed"):
        load_backend(with_plans, manifest, "fp16")
    with pytest.raises(BackendError, match=r"^cuda-bindings is not installed"):
        load_backend(with_plans, manifest, "fp32", "tensorrt-rtx")


def test_missing_runtime(with_plans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(BackendError, match="tensorrt_rtx is not installed; install it with pip"):
        load_backend(with_plans, read_manifest(with_plans), "fp32", "tensorrt-rtx")


def test_runtime_that_fails_to_import(
    with_plans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "pycuda"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "driver.py").write_text("raise ImportError('libcuda.so.1: no such file')")
    monkeypatch.syspath_prepend(package.parent)
    for name in ("pycuda", "pycuda.driver"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(BackendError, match=r"CUDA's driver \(libcuda.*NVIDIA driver"):
        load_backend(with_plans, read_manifest(with_plans), "fp32", "tensorrt-rtx")


def test_auto_skips_a_torch_that_fails_to_import(
    torch_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    assert load_backend(torch_bundle, read_manifest(torch_bundle), "fp32").name == "onnxruntime"
    assert "torch: cannot import torch (libcudart.so.13: no such file)" in caplog.text


def test_backend_without_artefacts_is_refused(bundle: Path) -> None:
    with pytest.raises(BundleError, match=r"no fp32 tensorrt artifact.*--engine tensorrt`"):
        load_backend(bundle, read_manifest(bundle), "fp32", "tensorrt")


def test_default_precision_is_the_backends_first(with_plans: Path) -> None:
    manifest = read_manifest(with_plans)
    for backend in ("auto", "onnxruntime", "tensorrt"):
        assert served_precision(manifest, backend) == "fp32"
    assert served_precision(manifest, "tensorrt-rtx") == "fp16"


@pytest.mark.usefixtures("without_driver_packages")
@pytest.mark.parametrize("command", [serve, predict])
def test_commands_pass_the_backend_option(command: Any, with_plans: Path, tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    image.touch()
    words = [with_plans, "--backend", "tensorrt-rtx", *([image] if command is predict else [])]
    result = CliRunner().invoke(command, [str(word) for word in words])
    assert isinstance(result.exception, BackendError)
    # The server's worker process finds the installed packages.
    assert re.search("cuda-bindings|no GPU|compute capability", str(result.exception))


@pytest.mark.parametrize(
    ("entry", "damaged", "sentence"),
    [
        ('"runtime_version"', '"version"', "runtime_version: Field required; export the bundle"),
        ('"opt": 8', '"opt": 9', "min <= opt <= max, not 1, 9 and 8"),
        ('"kind": "tensorrt-rtx"', '"kind": "onnx"', "engines need the field `engine`"),
    ],
)
def test_damaged_manifest(with_plans: Path, entry: str, damaged: str, sentence: str) -> None:
    path = with_plans / "manifest.json"
    path.write_text(path.read_text().replace(entry, damaged))
    with pytest.raises(BundleError, match=sentence):
        read_manifest(with_plans)


@pytest.mark.gpu
def test_other_streams_do_not_wait_for_a_long_kernel(bundle: Path) -> None:
    """The next batch is decoded in many streams while the model computes the previous batch."""
    program = """
import pathlib, sys, time
import torch
from maskrcnn_trt.model.bundle.manifest import read_manifest
from maskrcnn_trt.serving.backends.loading import load_backend, served_precision

folder = pathlib.Path(sys.argv[1])
manifest = read_manifest(folder)
load_backend(folder, manifest, served_precision(manifest, "auto"))
value = torch.zeros(1, device="cuda") + 1
streams = [torch.cuda.Stream() for _ in range(20)]
events = [torch.cuda.Event() for _ in streams]
for index, (stream, event) in enumerate(zip(streams, events)):
    with torch.cuda.stream(stream):
        torch.cuda._sleep(3 * 10**9) if index == 0 else value + 1
        event.record()
time.sleep(0.5)
print(sum(event.query() for event in events))
"""
    command = [sys.executable, "-c", program, str(bundle)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(result.stdout.split()[-1]) == 19
