import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")

from maskrcnn_trt.export.bundle import bundle_from_checkpoint  # noqa: E402
from maskrcnn_trt.model.bundle.manifest import BundleError, Precision, read_manifest  # noqa: E402
from maskrcnn_trt.model.bundle.program import Program  # noqa: E402
from maskrcnn_trt.model.bundle.spec import ShapeBucket  # noqa: E402
from maskrcnn_trt.serving.backends.base import Backend, HostOutputs, ModelOutputs  # noqa: E402
from maskrcnn_trt.serving.backends.loading import load_backend  # noqa: E402
from maskrcnn_trt.serving.backends.torch import GraphedProgram  # noqa: E402
from maskrcnn_trt.serving.errors import BackendError  # noqa: E402

BUCKET, OTHER = ShapeBucket(96, 160), ShapeBucket(160, 96)
TOLERANCES: dict[Precision, float] = {"fp32": 1e-3, "tf32": 0.05, "fp16": 0.02, "bf16": 0.2}


@pytest.fixture(scope="module")
def all_precisions(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundle with programs in every precision, for one input size."""
    path = tmp_path_factory.mktemp("bundles") / "all"
    bundle_from_checkpoint(
        tiny_checkpoint,
        path,
        precisions=tuple(TOLERANCES),
        buckets=[BUCKET],
        with_programs=True,
    )
    return path


@pytest.fixture(scope="module")
def backend(torch_bundle: Path) -> Iterator[Backend]:
    loaded = load_backend(torch_bundle, read_manifest(torch_bundle), "fp32", "torch", max_batch=6)
    yield loaded
    loaded.close()


def pictures(count: int, bucket: ShapeBucket = BUCKET, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, 3, *bucket), np.uint8)


def sizes(count: int, bucket: ShapeBucket = BUCKET) -> NDArray[np.int64]:
    return np.tile(np.array(bucket, np.int64), (count, 1))


def assert_alike(actual: HostOutputs, expected: HostOutputs, tolerance: float = 1e-3) -> None:
    np.testing.assert_array_equal(actual.num_detections, expected.num_detections)
    for name in ("boxes", "scores", "labels", "masks"):
        mine, theirs = getattr(actual, name), getattr(expected, name)
        assert mine.dtype == theirs.dtype
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(("bucket", "count"), [(BUCKET, 1), (OTHER, 3), (BUCKET, 6)])
def test_outputs_equal_those_of_onnxruntime(
    torch_bundle: Path, backend: Backend, bucket: ShapeBucket, count: int
) -> None:
    other = load_backend(torch_bundle, read_manifest(torch_bundle), "fp32", "onnxruntime")
    images, image_sizes = pictures(count, bucket), sizes(count, bucket)
    expected = other.infer(bucket, images, image_sizes)
    assert expected.num_detections.min() > 0
    assert_alike(backend.infer(bucket, images, image_sizes), expected)


def test_batches_are_independent(backend: Backend) -> None:
    large = backend.infer(BUCKET, pictures(6), sizes(6))
    backend.infer(BUCKET, pictures(5, seed=1), sizes(5))
    small = backend.infer(BUCKET, pictures(6)[:3], sizes(3))
    assert_alike(small, ModelOutputs(*(output[:3] for output in large)))


def test_concurrent_batches_do_not_mix(backend: Backend) -> None:
    def infer(seed: int) -> HostOutputs:
        return backend.infer(BUCKET, pictures(2, seed=seed), sizes(2))

    expected = [infer(n) for n in range(4)]
    with ThreadPoolExecutor(backend.concurrency) as threads:
        for number, result in enumerate(threads.map(infer, list(range(4)) * 3)):
            assert_alike(result, expected[number % 4])


def test_a_batch_above_the_maximum_is_rejected(backend: Backend) -> None:
    with pytest.raises(BackendError, match="7 images, but the backend was loaded for at most 6"):
        backend.infer(BUCKET, pictures(7), sizes(7))


def test_out_of_memory_names_the_remedy(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(Program, "__call__", run)
    monkeypatch.setattr(GraphedProgram, "__call__", run)
    with pytest.raises(BackendError, match=r"batches of up to 6 images; lower --max-batch"):
        backend.infer(BUCKET, pictures(2), sizes(2))


def test_a_damaged_program_is_rejected(torch_bundle: Path, tmp_path: Path) -> None:
    manifest = read_manifest(torch_bundle)
    for name in {name for artifact in manifest.artifacts for name in artifact.paths}:
        (tmp_path / name).write_bytes((torch_bundle / name).read_bytes()[:-1])
    with pytest.raises(BundleError, match=r"model-fp32-96x160\.(pt2|compiled) is not the file"):
        load_backend(tmp_path, manifest, "fp32", "torch")


def test_outputs_that_contradict_the_manifest(torch_bundle: Path) -> None:
    manifest = read_manifest(torch_bundle).model_copy(update={"mask_side": 7})
    backend = load_backend(torch_bundle, manifest, "fp32", "torch", max_batch=1)
    with pytest.raises(BundleError, match=r"mask_side.*manifest.*7"):
        backend.infer(BUCKET, pictures(1), sizes(1))
    backend.close()


@pytest.mark.parametrize(
    "entry", [{"input_dtype": "float32"}, {"bucket": ShapeBucket(128, 160)}], ids=str
)
def test_inputs_that_contradict_the_manifest(torch_bundle: Path, entry: dict[str, object]) -> None:
    manifest = read_manifest(torch_bundle)
    artifact = manifest.artifacts_for("fp32", "torch")[0]
    artifact = artifact.model_copy(update={"compiled": None, **entry})
    manifest = manifest.model_copy(update={"artifacts": (artifact,)})
    with pytest.raises(BundleError, match=rf"{artifact.path} .*manifest.*export"):
        load_backend(torch_bundle, manifest, "fp32", "torch")


@pytest.mark.parametrize(
    ("has_gpu", "reason"),
    [(False, "torch finds no NVIDIA GPU"), (True, "torch: torchvision is not installed")],
)
def test_without_a_gpu_or_torchvision_auto_prefers_onnxruntime(
    torch_bundle: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    has_gpu: bool,
    reason: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with caplog.at_level(logging.INFO, "maskrcnn_trt"):
        chosen = load_backend(torch_bundle, read_manifest(torch_bundle), "fp32")
    assert chosen.name == "onnxruntime"
    assert reason in caplog.text


@pytest.mark.slow
def test_loading_needs_no_model_code(torch_bundle: Path) -> None:
    program = (
        "import json, sys; from pathlib import Path\n"
        "from maskrcnn_trt.model.bundle.manifest import read_manifest\n"
        "from maskrcnn_trt.serving.backends.loading import load_backend\n"
        "bundle = Path(sys.argv[1]); manifest = read_manifest(bundle); a = manifest.artifacts\n"
        "one = [o for o in a if o.bucket == a[0].bucket]\n"  # each program takes seconds to load
        "manifest = manifest.model_copy(update={'artifacts': one})\n"
        "load_backend(bundle, manifest, 'fp32', 'torch')\n"
        "print(json.dumps([name for name in sys.modules if name.startswith('maskrcnn_trt.')]))"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(torch_bundle)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    loaded = set(json.loads(result.stdout))
    assert "maskrcnn_trt.model.bundle.program" in loaded
    assert not loaded & {f"maskrcnn_trt.model.{n}" for n in ("mask_rcnn", "backbone", "rpn")}
    assert not any(
        name.startswith(("maskrcnn_trt.export", "maskrcnn_trt.training")) for name in loaded
    )


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("precision", TOLERANCES)
def test_every_precision_is_near_the_checkpoint(
    all_precisions: Path, tiny_checkpoint: Path, precision: Precision
) -> None:
    from maskrcnn_trt.model.checkpoint import load_checkpoint

    model = load_checkpoint(tiny_checkpoint).build_model()
    images, image_sizes = pictures(4), sizes(4)
    with torch.inference_mode():
        expected = model.detect(torch.from_numpy(images), torch.from_numpy(image_sizes))
    manifest = read_manifest(all_precisions)
    backend = load_backend(all_precisions, manifest, precision, "torch", max_batch=4)
    actual = backend.infer(BUCKET, images, image_sizes)
    best = expected.scores[:, 0].numpy()
    np.testing.assert_allclose(actual.scores[:, 0], best, atol=TOLERANCES[precision])
    backend.close()


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_a_process_starts_without_compiling(all_precisions: Path, tmp_path: Path) -> None:
    program = (
        "import sys, torch; from pathlib import Path\n"
        "from maskrcnn_trt.model.bundle.manifest import read_manifest\n"
        "from maskrcnn_trt.serving.backends.loading import load_backend\n"
        "from torch._inductor import compile_fx\n"
        "torch.compile = compile_fx.compile_fx = compile_fx.compile_fx_inner = None\n"
        "bundle = Path(sys.argv[1]); manifest = read_manifest(bundle)\n"
        "load_backend(bundle, manifest, 'fp16', 'torch', 4).warm_up(4)\n"
    )
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", program, str(all_precisions)]
    subprocess.run(command, check=True, env={**os.environ, **environment})


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_programs_of_another_torch_version_are_compiled_again(
    all_precisions: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(all_precisions, bundle)
    old = (bundle / "manifest.json").read_text().replace(f'"{torch.__version__}"', '"2.0.0"')
    (bundle / "manifest.json").write_text(old)
    images, image_sizes = pictures(2), sizes(2)
    first = load_backend(all_precisions, read_manifest(all_precisions), "fp32", "torch", 2)
    second = load_backend(bundle, read_manifest(bundle), "fp32", "torch", 2)
    assert "was compiled by torch 2.0.0" in caplog.text
    assert_alike(
        second.infer(BUCKET, images, image_sizes), first.infer(BUCKET, images, image_sizes)
    )
    first.close()
    second.close()
