import hashlib
import logging
import os
import weakref
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnxruntime
import pytest
from bundle_copies import linked_copy
from numpy.typing import NDArray

from maskrcnn_trt.model.bundle.manifest import BundleError, Precision, read_manifest
from maskrcnn_trt.model.bundle.spec import INPUT_NAMES, OUTPUT_NAMES, ShapeBucket
from maskrcnn_trt.serving.backends.base import HostOutputs, ModelOutputs
from maskrcnn_trt.serving.backends.onnxruntime import OnnxRuntimeBackend, cuda_options
from maskrcnn_trt.serving.errors import BackendError

BUCKET = ShapeBucket(96, 160)

# Warning of an ONNX Runtime that was built without the CUDA provider.
without_cuda = pytest.mark.filterwarnings("ignore:Specified provider 'CUDAExecutionProvider'")


def batch_of(count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    rng = np.random.default_rng(count)
    tiles = rng.integers(0, 256, (count, 3, 12, 20), np.uint8)
    sizes = np.array([[96, 160 - 16 * n] for n in range(count)])
    return np.kron(tiles, np.ones((1, 1, 8, 8), np.uint8)), sizes


def assert_same(actual: HostOutputs, expected: list[NDArray[np.generic]], tolerance: float) -> None:
    assert expected[0].all()  # every image has detections
    for output, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(output, wanted, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def reference(wide_bundle: Path) -> onnxruntime.InferenceSession:
    """Session on the CPU with default options."""
    (path,) = (
        wide_bundle / a.path for a in read_manifest(wide_bundle).artifacts if a.bucket == BUCKET
    )
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


@pytest.fixture
def backend(wide_bundle: Path) -> OnnxRuntimeBackend:
    return OnnxRuntimeBackend(wide_bundle, read_manifest(wide_bundle), "fp32")


def assert_equals(
    backend: OnnxRuntimeBackend,
    reference: onnxruntime.InferenceSession,
    *counts: int,
    tolerance: float = 1e-4,
) -> None:
    """Compare the backend with a plain session, for batches of these sizes."""
    for count in counts:
        batch = batch_of(count)
        expected = reference.run(OUTPUT_NAMES, dict(zip(INPUT_NAMES, batch, strict=True)))
        assert_same(backend.infer(BUCKET, *batch), expected, tolerance)


def test_outputs_equal_those_of_a_plain_session(
    backend: OnnxRuntimeBackend, reference: onnxruntime.InferenceSession
) -> None:
    assert_equals(backend, reference, 1, 3)


@pytest.mark.parametrize("count", [1, 4])
def test_bound_batch_stays_on_the_device(backend: OnnxRuntimeBackend, count: int) -> None:
    batch = batch_of(count)
    compute = backend.bind_on_device(BUCKET, *batch)
    compute()
    values = compute()
    assert {value.device_name() for value in values} == {backend.device}
    expected = backend.infer(BUCKET, *batch)
    assert_same(ModelOutputs(*(value.numpy() for value in values)), list(expected), 0)


@without_cuda
def test_gpu_batches_are_padded_to_session_sizes(
    wide_bundle: Path,
    reference: onnxruntime.InferenceSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ONNX Runtime falls back to the CPU, but with sessions of fixed sizes."""
    batch_sizes: list[list[int]] = []
    new_session = onnxruntime.InferenceSession

    def create(*arguments: object, **options: object) -> onnxruntime.InferenceSession:
        session = new_session(*arguments, **options)
        batch_sizes.append([tensor.shape[0] for tensor in session.get_inputs()])
        return session

    backend = OnnxRuntimeBackend(wide_bundle, read_manifest(wide_bundle), "fp32")
    monkeypatch.setattr(onnxruntime, "InferenceSession", create)
    backend.device = "cuda"
    backend.warm_up(4)
    assert batch_sizes == [[1, 1], [2, 2], [4, 4]]
    assert_equals(backend, reference, 3, 4, 1, 5, 3)
    assert batch_sizes[3:] == [[5, 5]]


@without_cuda
@pytest.mark.parametrize(
    ("message", "good_runs"),
    [
        ("bfc_arena.cc:360 Failed to allocate memory for requested buffer of size 35990274304", 0),
        ("bfc_arena.cc:389 Available memory of 16 is smaller than requested bytes of 3599027", 1),
    ],
)
def test_out_of_memory_selects_smaller_algorithms(
    backend: OnnxRuntimeBackend,
    reference: onnxruntime.InferenceSession,
    monkeypatch: pytest.MonkeyPatch,
    message: str,
    good_runs: int,
) -> None:
    """ONNX Runtime falls back to the CPU; its sessions simulate lack of memory."""
    searches: list[str] = []

    class Session(onnxruntime.InferenceSession):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.search = options["providers"][0][1]["cudnn_conv_algo_search"]
            self.runs = 0
            searches.append(self.search)

        def run(self, *arguments: Any, **options: Any) -> Any:
            self.runs += 1
            if self.search == "EXHAUSTIVE" and self.runs > good_runs:
                raise RuntimeError(message)
            return super().run(*arguments, **options)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    backend.device = "cuda"
    assert_equals(backend, reference, 2)
    assert searches == ["EXHAUSTIVE", "DEFAULT"]


class GreedySession(onnxruntime.InferenceSession):
    """Session on the CPU that simulates memory for one session per model."""

    alive: ClassVar[weakref.WeakSet["GreedySession"]] = weakref.WeakSet()

    def __init__(self, path: Path, *arguments: Any, **options: Any) -> None:
        super().__init__(path, *arguments, **options)
        self.path = path
        self.alive.add(self)

    def run(self, *arguments: Any, **options: Any) -> Any:
        if sum(other.path == self.path for other in self.alive) > 1:
            raise RuntimeError("bfc_arena.cc:360 Failed to allocate memory for requested buffer")
        return super().run(*arguments, **options)


@without_cuda
def test_sessions_of_smaller_batches_are_dropped_for_memory(
    backend: OnnxRuntimeBackend,
    reference: onnxruntime.InferenceSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(onnxruntime, "InferenceSession", GreedySession)
    backend.device = "cuda"
    backend.warm_up(2)
    assert len(GreedySession.alive) == len(backend.buckets)
    assert_equals(backend, reference, 2, 1, 3)
    assert len(GreedySession.alive) == len(backend.buckets)


@without_cuda
def test_batch_beyond_the_memory_is_rejected(
    backend: OnnxRuntimeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> None:
        raise RuntimeError("bfc_arena.cc:360 Failed to allocate memory for requested buffer")

    monkeypatch.setattr(onnxruntime.InferenceSession, "run", run)
    backend.device = "cuda"
    with pytest.raises(
        BackendError, match="too little free memory for batches of 2 images in fp32"
    ):
        backend.infer(BUCKET, *batch_of(2))


@without_cuda
def test_cuda_provider_that_does_not_load(
    wide_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with caplog.at_level(logging.WARNING):
        backend = OnnxRuntimeBackend(wide_bundle, read_manifest(wide_bundle), "fp32")
    assert backend.device == "cpu"
    (record,) = caplog.records
    assert "uses the CPU" in record.message
    assert "nvidia-smi" in record.message
    assert len(backend.infer(BUCKET, *batch_of(3)).scores) == 3


def test_options_of_the_cuda_provider() -> None:
    """Only fp32 avoids TF32, and only the exhaustive search has a memory limit."""
    allowed: dict[Precision, str] = {"fp32": "0", "tf32": "1", "fp16": "1"}
    for precision, tf32 in allowed.items():
        fast, thrifty = cuda_options(precision, 1 << 30), cuda_options(precision, None)
        assert fast["use_tf32"] == thrifty["use_tf32"] == tf32
        assert fast["cudnn_conv_algo_search"] == "EXHAUSTIVE"
        assert fast["gpu_mem_limit"] == "1073741824"
        assert thrifty["cudnn_conv_algo_search"] == "DEFAULT"
        assert "gpu_mem_limit" not in thrifty


@pytest.mark.parametrize("content", [b"no graph", b""])
def test_damaged_model_is_rejected(bundle: Path, tmp_path: Path, content: bytes) -> None:
    manifest = read_manifest(bundle)
    for artifact in manifest.artifacts:
        (tmp_path / artifact.path).write_bytes(content)
    with pytest.raises(BundleError, match="is not the file that was exported"):
        OnnxRuntimeBackend(tmp_path, manifest, "fp32")
    damaged = [
        artifact.model_copy(update={"sha256": hashlib.sha256(content).hexdigest()})
        for artifact in manifest.artifacts
    ]
    with pytest.raises(BundleError, match=r"\.onnx .* export the bundle again"):
        OnnxRuntimeBackend(tmp_path, manifest.model_copy(update={"artifacts": damaged}), "fp32")


def test_path_that_is_not_utf_8_is_rejected(bundle: Path, tmp_path: Path) -> None:
    copy = linked_copy(bundle, tmp_path / os.fsdecode(b"bundle\xff"))
    with pytest.raises(BundleError, match=r"not UTF-8; rename or move"):
        OnnxRuntimeBackend(copy, read_manifest(copy), "fp32")


@pytest.mark.parametrize("entry", ["max_detections", "mask_side"])
def test_outputs_that_contradict_the_manifest(wide_bundle: Path, entry: str) -> None:
    manifest = read_manifest(wide_bundle).model_copy(update={entry: 7})
    backend = OnnxRuntimeBackend(wide_bundle, manifest, "fp32")
    with pytest.raises(BundleError, match=rf"{entry}.*manifest.*\b7\b"):
        backend.infer(BUCKET, *batch_of(1))


@pytest.mark.parametrize(
    ("entry", "fact"),
    [({"input_dtype": "float32"}, "float"), ({"bucket": ShapeBucket(128, 160)}, "128, 160")],
)
def test_inputs_that_contradict_the_manifest(
    wide_bundle: Path, entry: dict[str, Any], fact: str
) -> None:
    manifest = read_manifest(wide_bundle)
    artifact = manifest.artifacts[0].model_copy(update=entry)
    manifest = manifest.model_copy(update={"artifacts": (artifact,)})
    with pytest.raises(BundleError, match=rf"{artifact.path} .*manifest.*{fact}.*export"):
        OnnxRuntimeBackend(wide_bundle, manifest, "fp32")


@pytest.mark.gpu
def test_on_a_gpu(backend: OnnxRuntimeBackend, reference: onnxruntime.InferenceSession) -> None:
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime-gpu is not installed")
    assert backend.device == "cuda"
    assert_equals(backend, reference, 1, 3, tolerance=1e-2)
