"""Detections and dependencies of TensorRT engines on a GPU.

The engines are compared with the checkpoint in fp32 on the
CPU, within `export.verify.TOLERANCES`.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorrt_stubs import needs_tensorrt

from maskrcnn_trt.export.bundle import bundle_from_checkpoint
from maskrcnn_trt.export.engines.build import builder_for
from maskrcnn_trt.export.engines.build_log import BuildLog
from maskrcnn_trt.export.engines.inspection import inspected_layers, inspected_tensors, load_engine
from maskrcnn_trt.export.engines.layers import check_precision
from maskrcnn_trt.export.engines.options import EngineOptions
from maskrcnn_trt.export.verify import compare_artifact, reference_batches
from maskrcnn_trt.model.bundle.manifest import Manifest, Precision, read_manifest
from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.model.checkpoint import load_checkpoint
from maskrcnn_trt.serving.backends.loading import load_backend

pytestmark = [pytest.mark.tensorrt, needs_tensorrt]

PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "fp16")
PLUGINS = {f"maskrcnn::{name}": "1" for name in ("DecodeBoxes", "NmsKeep", "PyramidRoIAlign")}
BUCKET = ShapeBucket(96, 160)
MAX_BATCH = 4


@pytest.fixture(scope="module", params=[True, False], ids=["plugins", "function bodies"])
def plugins(request: pytest.FixtureRequest) -> bool:
    """Whether the engines contain our CUDA kernels."""
    return bool(request.param)


@pytest.fixture(scope="module")
def bundle(plugins: bool, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundle with one engine per precision, with or without plugins."""
    folder = tmp_path_factory.mktemp("engines")
    log = BuildLog(folder / "build.log")
    options = EngineOptions(
        batches=(1, MAX_BATCH), plugins=plugins, timing_cache=folder.parent / "timing.cache"
    )
    builders = [builder_for("tensorrt", options, log)]
    path = folder / "bundle"
    bundle_from_checkpoint(
        tiny_checkpoint, path, precisions=PRECISIONS, buckets=(BUCKET,), builders=builders
    )
    assert log.errors == []
    return path


@pytest.fixture(scope="module")
def manifest(bundle: Path) -> Manifest:
    return read_manifest(bundle)


def test_manifest_lists_the_engines(manifest: Manifest, plugins: bool) -> None:
    engines = [artifact.engine for artifact in manifest.artifacts if artifact.engine]
    assert len(engines) == len(PRECISIONS)
    major, minor = torch.cuda.get_device_capability()
    for engine in engines:
        assert engine.compute_capabilities == (f"{major}.{minor}",)
        assert engine.plugins == (PLUGINS if plugins else {})


@pytest.mark.parametrize("precision", PRECISIONS)
def test_engine_reproduces_the_checkpoint(
    bundle: Path, manifest: Manifest, tiny_checkpoint: Path, precision: Precision
) -> None:
    (artifact,) = manifest.artifacts_for(precision, "tensorrt")
    batches = reference_batches(load_checkpoint(tiny_checkpoint), manifest, [])[BUCKET]
    backend = load_backend(bundle, manifest, precision, "tensorrt", MAX_BATCH)
    try:
        comparison = compare_artifact(
            artifact, batches, lambda images, sizes: backend.infer(BUCKET, images, sizes)
        )
    finally:
        backend.close()
    assert comparison.detections > 0
    assert comparison.passed, comparison


@pytest.mark.parametrize("precision", PRECISIONS)
def test_batch_size_does_not_change_detections(
    bundle: Path, manifest: Manifest, precision: Precision
) -> None:
    """An image has the same detections alone and in a batch with empty images."""
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (1, 3, *BUCKET), np.uint8)
    backend = load_backend(bundle, manifest, precision, "tensorrt", MAX_BATCH)
    try:
        alone = backend.infer(BUCKET, image, np.array([BUCKET]))
        for batch in range(2, MAX_BATCH + 1):
            images = np.concatenate([image, np.zeros((batch - 1, 3, *BUCKET), np.uint8)])
            found = backend.infer(BUCKET, images, np.array([BUCKET] * batch))
            assert found.num_detections.shape == (batch,)
            assert abs(found.num_detections[0] - alone.num_detections[0]) <= 1
            assert abs(found.scores[0, 0] - alone.scores[0, 0]) < 2e-2
    finally:
        backend.close()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_inspector_reports_types_and_profiles(
    bundle: Path, manifest: Manifest, precision: Precision
) -> None:
    (artifact,) = manifest.artifacts_for(precision, "tensorrt")
    trt, engine = load_engine(bundle / artifact.path, "tensorrt")
    check_precision(inspected_layers(trt, engine), precision, artifact.path)
    images, sizes, *outputs = inspected_tensors(trt, engine)
    assert (images.dtype, images.shape) == ("uint8", (-1, 3, *BUCKET))
    assert [shapes[0][0] for shapes in images.profiles] == [1, 2]
    assert [shapes[2][0] for shapes in images.profiles] == [1, MAX_BATCH]
    assert sizes.dtype == "int64"
    assert not any(output.is_input for output in outputs)


def test_plan_runs_in_a_process_without_our_plugins(
    bundle: Path, manifest: Manifest, tmp_path: Path
) -> None:
    """A server has neither torch nor the plugins."""
    image = np.random.default_rng(0).integers(0, 256, (1, 3, *BUCKET), np.uint8)
    np.save(tmp_path / "image.npy", image)
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "from maskrcnn_trt.model.bundle.manifest import read_manifest\n"
        "from maskrcnn_trt.serving.backends.loading import load_backend\n"
        "bundle, image, scores = map(Path, sys.argv[1:])\n"
        "backend = load_backend(bundle, read_manifest(bundle), 'fp16', 'tensorrt')\n"
        f"found = backend.infer(backend.buckets[0], np.load(image), np.array([{tuple(BUCKET)}]))\n"
        "np.save(scores, found.scores)\n"
        "backend.close()\n"
        "assert 'maskrcnn_trt.plugins.tensorrt.plugins' not in sys.modules\n"
    )
    files = (bundle, tmp_path / "image.npy", tmp_path / "scores.npy")
    subprocess.run([sys.executable, "-c", script, *map(str, files)], check=True, timeout=300)
    backend = load_backend(bundle, manifest, "fp16", "tensorrt")
    try:
        found = backend.infer(BUCKET, image, np.array([BUCKET]))
    finally:
        backend.close()
    np.testing.assert_allclose(np.load(tmp_path / "scores.npy"), found.scores, atol=1e-3)
