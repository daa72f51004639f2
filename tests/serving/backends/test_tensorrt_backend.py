"""Host code of the TensorRT backend on a GPU, with engines that copy inputs to outputs.

`test_gpu_execution.py` runs these tests with a stub of CUDA's driver as well.
"""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.serving.errors import BackendError

pytest.importorskip("cuda.bindings.driver", exc_type=ImportError)

from fake_tensorrt import (
    BUCKETS,
    SCRATCH,
    FakeTensorRT,
    contexts_of,
    expected_outputs,
    fake_bundle,
)

from maskrcnn_trt.serving.backends import tensorrt
from maskrcnn_trt.serving.backends.gpu_execution import GpuDriver
from maskrcnn_trt.serving.backends.tensorrt import TensorRTBackend
from maskrcnn_trt.serving.engines.bundle_engine import BundleLoader

pytestmark = pytest.mark.gpu

MAX_BATCH = 6
Load = Callable[..., TensorRTBackend]


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> FakeTensorRT:
    fake = FakeTensorRT()
    monkeypatch.setitem(sys.modules, "tensorrt", fake)
    return fake


@pytest.fixture
def load_beside_torch(
    trt: FakeTensorRT, driver: GpuDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Load]:
    """Function that loads a backend, for tests in which torch allocates GPU memory as well."""
    monkeypatch.setattr(tensorrt, "load_driver", lambda: driver)

    def load_backend(kind: type[TensorRTBackend] = TensorRTBackend) -> TensorRTBackend:
        return kind(tmp_path, fake_bundle(tmp_path), "fp16", "tensorrt", MAX_BATCH)

    yield load_backend
    assert contexts_of(trt) == []
    assert not trt.live


@pytest.fixture
def load(load_beside_torch: Load, driver: GpuDriver) -> Iterator[Load]:
    """Function that loads a backend. After the test, all GPU memory must be free again."""
    with driver.current():
        before = driver.free_memory()
    yield load_beside_torch
    with driver.current():
        assert before - driver.free_memory() < SCRATCH


def check_batch(backend: TensorRTBackend, bucket: ShapeBucket, count: int, seed: int) -> None:
    """Compute a batch of random images, and check every byte of the outputs."""
    generator = np.random.default_rng(seed)
    images = generator.integers(0, 256, (count, 3, *bucket), np.uint8)
    sizes = generator.integers(1, 1 << 40, (count, 2), np.int64)
    outputs = backend.infer(bucket, images, sizes)
    for name, expected in expected_outputs(images, sizes).items():
        np.testing.assert_array_equal(bytes_of(getattr(outputs, name)), expected)


def bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)


def test_batches_of_all_sizes(trt: FakeTensorRT, driver: GpuDriver, load: Load) -> None:
    with driver.current():
        before = driver.free_memory()
    backend = load()
    with driver.current():
        assert before - driver.free_memory() >= SCRATCH
    backend.warm_up(MAX_BATCH)
    for count in range(1, MAX_BATCH + 1):
        for bucket in BUCKETS:
            check_batch(backend, bucket, count, count)
    # Each context has one batch size. For each buffer, that runs once, and is captured once.
    expected = [[size] * 2 * backend.concurrency for size in (1, 1, 2, 2, 4, 4, 6, 6)]
    assert sorted(context.computed for context in contexts_of(trt)) == expected
    backend.close()


def test_failed_capture(trt: FakeTensorRT, load: Load, caplog: pytest.LogCaptureFixture) -> None:
    """Batches are computed without CUDA graphs."""
    backend = load()
    trt.faults.add("capture")
    for seed in range(3):
        check_batch(backend, BUCKETS[0], 2, seed)
    (warning,) = (r.message for r in caplog.records if r.levelname == "WARNING")
    assert "capture broke" in warning
    assert "CUDA graphs" in warning
    backend.close()


def test_torch_tensors_on_the_gpu(trt: FakeTensorRT, load_beside_torch: Load) -> None:
    torch = pytest.importorskip("torch")
    from maskrcnn_trt.serving.backends.tensorrt import TensorRTDeviceBackend

    backend = load_beside_torch(TensorRTDeviceBackend)
    backend.warm_up(MAX_BATCH)
    results = []
    for count in (6, 1, 3, 2):  # queued without waiting for the GPU
        for bucket in BUCKETS:
            images = torch.randint(0, 256, (count, 3, *bucket), dtype=torch.uint8, device="cuda")
            sizes = torch.randint(1, 1 << 40, (count, 2), device="cuda")
            results.append((images, sizes, backend.infer_on_device(bucket, images, sizes)))
    check_batch(backend, BUCKETS[0], 5, 1)
    for images, sizes, outputs in results:
        for name, expected in expected_outputs(images.cpu().numpy(), sizes.cpu().numpy()).items():
            found = getattr(outputs, name).cpu().numpy()
            np.testing.assert_array_equal(bytes_of(found), expected)
    # Each context runs once and is captured once; that for 6 images also runs for the host.
    counts = [len(context.computed) for context in contexts_of(trt)]
    assert sorted(counts) == [2] * 7 + [4]
    backend.close()


def test_engine_from_file_to_response_with_torch(load_beside_torch: Load, tmp_path: Path) -> None:
    """Black images are decoded, computed and encoded on the GPU."""
    pytest.importorskip("torch")
    loader = BundleLoader(tmp_path, fake_bundle(tmp_path), "fp16", "tensorrt", MAX_BATCH)
    engine = loader.load()
    assert engine.info.is_end_to_end
    engine.warm_up(MAX_BATCH)
    engine.close()


def test_threads_do_not_mix_their_batches(load: Load) -> None:
    backend = load()
    with ThreadPoolExecutor(6) as threads:
        batches = [
            threads.submit(check_batch, backend, BUCKETS[n % 2], 1 + n % MAX_BATCH, n)
            for n in range(120)
        ]
        for batch in batches:
            batch.result()
    backend.close()


def test_two_backends_compute_at_once(load: Load) -> None:
    backends = [load(), load()]
    with ThreadPoolExecutor(4) as threads:
        batches = [
            threads.submit(check_batch, backends[n % 2], BUCKETS[n % 3 % 2], 3, n)
            for n in range(40)
        ]
        for batch in batches:
            batch.result()
    backends[0].close()
    check_batch(backends[1], BUCKETS[0], MAX_BATCH, 7)
    backends[1].close()


@pytest.mark.parametrize("fault", ["set_tensor_address", "execute_async_v3"])
def test_failed_batches_leave_the_backend_usable(trt: FakeTensorRT, load: Load, fault: str) -> None:
    backend = load()
    trt.faults.add(fault)
    for _ in range(2 * backend.concurrency):
        with pytest.raises(BackendError, match=f"{fault} broke"):
            check_batch(backend, BUCKETS[0], 2, 1)
    trt.faults.clear()
    check_batch(backend, BUCKETS[0], 2, 2)
    with pytest.raises(BackendError, match="at most 6"):
        check_batch(backend, BUCKETS[0], MAX_BATCH + 1, 1)
    backend.close()


@pytest.mark.parametrize(
    "fault",
    ["deserialize_cuda_engine", "create_execution_context", "set_optimization_profile_async"],
)
def test_failed_load_releases_everything(trt: FakeTensorRT, load: Load, fault: str) -> None:
    trt.faults.add(fault)
    with pytest.raises(BackendError, match=f"{fault} broke"):
        load()


def test_plans_that_need_too_much_memory(trt: FakeTensorRT, load: Load) -> None:
    trt.scratch = 1 << 46
    with pytest.raises(BackendError, match="MiB of GPU memory"):
        load()
