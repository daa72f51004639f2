"""Memory, streams and overlap on a GPU, without TensorRT; partly with a stub of CUDA's driver."""

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver_stubs import needs_compiler, stubbed_driver
from numpy.typing import NDArray

from maskrcnn_trt.serving.backends.base import TensorSpec, wait_until
from maskrcnn_trt.serving.backends.gpu_execution import BatchRunner, GpuDriver

cuda = pytest.importorskip("cuda.bindings.driver", exc_type=ImportError)

ROWS, COLUMNS = 8, 1 << 16
SPEC = TensorSpec((ROWS, COLUMNS), np.dtype(np.float32))
SPECS = {"given": SPEC, "taken": SPEC}


def copy_given(addresses: Mapping[str, int], stream: int) -> None:
    """Computation that copies the input to the output."""
    (status,) = cuda.cuMemcpyDtoDAsync(addresses["taken"], addresses["given"], SPEC.nbytes, stream)
    assert status == cuda.CUresult.CUDA_SUCCESS


def batch(seed: int, rows: int = ROWS) -> NDArray[np.float32]:
    return np.random.default_rng(seed).random((rows, COLUMNS), np.float32)


def new_runner(driver: GpuDriver) -> BatchRunner:
    return BatchRunner(driver, {name: spec.nbytes for name, spec in SPECS.items()}, depth=2)


@pytest.fixture
def runner(driver: GpuDriver) -> Iterator[BatchRunner]:
    with driver.current():
        before = driver.free_memory()
        made = new_runner(driver)
    yield made
    with driver.current():
        made.close()
        # The runner has four buffers of this size. The driver may keep memory for its own use.
        assert before - driver.free_memory() <= SPEC.nbytes


def run(runner: BatchRunner, given: NDArray[Any], launch: Any = copy_given) -> NDArray[Any]:
    with runner._driver.current():
        outputs = runner.run({"given": given}, SPECS, launch)
    assert list(outputs) == ["taken"]
    return outputs["taken"]


@needs_compiler
def test_cuda_bindings_with_a_stub_driver(tmp_path: Path) -> None:
    """The stub fails calls outside of the context, and counts every resource that is not released.

    It shows no overlap, and nothing about a GPU.
    """
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0"]
    # The conftest.py of the folders above skips tests for GPUs.
    command += [f"--confcutdir={folder}", __file__, folder / "test_tensorrt_backend.py"]
    command += ["-m", "gpu", "-k", "CudaBindings and not torch and not while"]
    environment = stubbed_driver(tmp_path, 1)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout


@needs_compiler
def test_machine_without_a_gpu(tmp_path: Path) -> None:
    script = "from maskrcnn_trt.serving.backends.gpu_execution import load_driver; load_driver()"
    environment = stubbed_driver(tmp_path, 0)
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert "no GPU responds" in result.stderr.splitlines()[-1]


@pytest.mark.gpu
def test_device_facts_equal_those_of_torch(driver: GpuDriver) -> None:
    torch = pytest.importorskip("torch")
    properties = torch.cuda.get_device_properties(0)
    with driver.current():
        assert driver.compute_capability() == f"{properties.major}.{properties.minor}"
        assert driver.gpu_name() == torch.cuda.get_device_name(0)
        version = ctypes.c_int()
        assert ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0
        assert driver.cuda_version() == version.value
        assert 0 < driver.free_memory() <= properties.total_memory


@pytest.mark.gpu
def test_memory_is_released(driver: GpuDriver) -> None:
    size = 256 << 20
    with driver.current():
        before = driver.free_memory()
        memory = driver.new_memory(size)
        assert memory.address % 256 == 0
        assert before - driver.free_memory() >= size
        memory.close()
        driver.synchronize()
        assert before - driver.free_memory() < size


@pytest.mark.gpu
def test_exhausted_memory_releases_what_was_allocated(driver: GpuDriver) -> None:
    with driver.current():
        before = driver.free_memory()
        with pytest.raises(Exception, match="out of memory"):
            BatchRunner(driver, {"small": 1 << 20, "large": 1 << 46}, depth=1)
        assert before - driver.free_memory() < 1 << 20


@pytest.mark.gpu
def test_batches_are_copied_in_and_out(runner: BatchRunner) -> None:
    first, second = run(runner, batch(1)), run(runner, batch(2))
    np.testing.assert_array_equal(first, batch(1))
    np.testing.assert_array_equal(second, batch(2))


@pytest.mark.gpu
def test_missing_rows_are_zero(runner: BatchRunner) -> None:
    for seed in range(2):  # fills both buffers
        run(runner, batch(seed))
    taken = run(runner, batch(3, rows=5))
    np.testing.assert_array_equal(taken[:5], batch(3, rows=5))
    assert not taken[5:].any()


@pytest.mark.gpu
def test_inputs_are_converted_to_the_dtype_of_the_tensor(runner: BatchRunner) -> None:
    given = np.arange(ROWS * COLUMNS, dtype=np.uint8).reshape(ROWS, COLUMNS)
    np.testing.assert_array_equal(run(runner, given), given.astype(np.float32))


@pytest.mark.gpu
def test_smaller_batches_share_the_memory(runner: BatchRunner) -> None:
    small = TensorSpec((1, 3), np.dtype(np.float32))
    specs = {"given": small, "taken": small}
    given = np.array([[1, 2, 3]], np.float32)
    with runner._driver.current():
        outputs = runner.run({"given": given}, specs, copy_given)
    np.testing.assert_array_equal(outputs["taken"], given)


@pytest.mark.gpu
def test_concurrent_batches_do_not_mix(runner: BatchRunner) -> None:
    with ThreadPoolExecutor(6) as threads:
        results = list(threads.map(lambda seed: run(runner, batch(seed)), range(60)))
    for seed, result in enumerate(results):
        np.testing.assert_array_equal(result, batch(seed))


@pytest.mark.gpu
def test_failed_launch_leaves_the_runner_usable(runner: BatchRunner) -> None:
    def refuse(addresses: Mapping[str, int], stream: int) -> None:
        raise ValueError("refused")

    for _ in range(4):
        with pytest.raises(ValueError, match="refused"):
            run(runner, batch(1), refuse)
    np.testing.assert_array_equal(run(runner, batch(2)), batch(2))


@pytest.mark.gpu
def test_batch_is_copied_in_while_another_computes(runner: BatchRunner) -> None:
    driver = runner._driver
    with driver.current():
        memories = [driver.new_pinned_memory(size) for size in (4, SPEC.nbytes)]
        probe, probed = driver.new_stream(), driver.new_event()
    flag = memories[0].array.view(np.uint32)
    seen = memories[1].array.view(SPEC.dtype).reshape(SPEC.shape)
    flag[0] = 0
    first_computes = threading.Event()
    arrived = []

    def compute_until_flagged(addresses: Mapping[str, int], stream: int) -> None:
        wait = cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        (status,) = cuda.cuStreamWaitValue32(stream, flag.ctypes.data, 1, wait.value)
        assert status == cuda.CUresult.CUDA_SUCCESS
        copy_given(addresses, stream)
        first_computes.set()

    def watch_arrival(addresses: Mapping[str, int], stream: int) -> None:
        deadline, given = time.monotonic() + 30, batch(2)
        try:
            while not arrived and time.monotonic() < deadline:
                probe.copy_out(seen, addresses["given"])
                probe.record(probed)
                wait_until(probed.is_done)
                if (seen == given).all():
                    arrived.append(True)
        finally:
            flag[0] = 1  # else the GPU would wait forever
        copy_given(addresses, stream)

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(run, runner, batch(1), compute_until_flagged)
        assert first_computes.wait(30)
        second = threads.submit(run, runner, batch(2), watch_arrival)
        np.testing.assert_array_equal(second.result(), batch(2))
        np.testing.assert_array_equal(first.result(), batch(1))
    assert arrived
    with driver.current():
        for resource in (*memories, probe, probed):
            resource.close()


@pytest.mark.gpu
def test_torch_can_use_the_gpu_as_well(driver: GpuDriver) -> None:
    torch = pytest.importorskip("torch")
    with driver.current():
        runner = new_runner(driver)
    numbers = torch.arange(10, device="cuda")
    np.testing.assert_array_equal(run(runner, batch(1)), batch(1))
    assert int(numbers.sum()) == 45
    with driver.current():
        runner.close()
