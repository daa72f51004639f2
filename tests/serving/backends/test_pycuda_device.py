"""Memory, streams and overlap on a GPU, without TensorRT."""

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from maskrcnn_trt.serving.backends.base import TensorSpec

cuda = pytest.importorskip("pycuda.driver", exc_type=ImportError)
driver = pytest.importorskip("cuda.bindings.driver", exc_type=ImportError)

from maskrcnn_trt.serving.backends.pycuda_device import (  # noqa: E402
    BatchRunner,
    DeviceMemory,
    compute_capability,
    current_gpu,
    free_memory,
    synchronize,
)

pytestmark = pytest.mark.gpu

ROWS, COLUMNS = 8, 1 << 16
SPEC = TensorSpec((ROWS, COLUMNS), np.dtype(np.float32))
SPECS = {"given": SPEC, "taken": SPEC}


def copy_given(addresses: Mapping[str, int], stream: int) -> None:
    """Computation that copies the input to the output."""
    (status,) = driver.cuMemcpyDtoDAsync(
        addresses["taken"], addresses["given"], SPEC.nbytes, stream
    )
    assert status == driver.CUresult.CUDA_SUCCESS


def batch(seed: int, rows: int = ROWS) -> NDArray[np.float32]:
    return np.random.default_rng(seed).random((rows, COLUMNS), np.float32)


@pytest.fixture
def runner() -> Iterator[BatchRunner]:
    with current_gpu():
        yield BatchRunner({name: spec.nbytes for name, spec in SPECS.items()}, depth=2)


def run(runner: BatchRunner, given: NDArray[Any], launch: Any = copy_given) -> NDArray[Any]:
    with current_gpu():
        outputs = runner.run({"given": given}, SPECS, launch)
    assert list(outputs) == ["taken"]
    return outputs["taken"]


def test_device_facts_equal_those_of_torch() -> None:
    with current_gpu():
        assert compute_capability() == ".".join(map(str, torch.cuda.get_device_capability(0)))
        before = free_memory()
        assert 0 < before <= torch.cuda.get_device_properties(0).total_memory
        memory = DeviceMemory(256 << 20)
        assert memory.address % 256 == 0
        assert before - free_memory() >= 256 << 20
        del memory
        synchronize()
        assert before - free_memory() < 256 << 20


def test_batches_are_copied_in_and_out(runner: BatchRunner) -> None:
    first, second = run(runner, batch(1)), run(runner, batch(2))
    np.testing.assert_array_equal(first, batch(1))
    np.testing.assert_array_equal(second, batch(2))


def test_missing_rows_are_zero(runner: BatchRunner) -> None:
    for seed in range(2):  # fills both buffers
        run(runner, batch(seed))
    taken = run(runner, batch(3, rows=5))
    np.testing.assert_array_equal(taken[:5], batch(3, rows=5))
    assert not taken[5:].any()


def test_inputs_are_converted_to_the_dtype_of_the_tensor(runner: BatchRunner) -> None:
    given = np.arange(ROWS * COLUMNS, dtype=np.uint8).reshape(ROWS, COLUMNS)
    np.testing.assert_array_equal(run(runner, given), given.astype(np.float32))


def test_smaller_batches_share_the_memory(runner: BatchRunner) -> None:
    small = TensorSpec((1, 3), np.dtype(np.float32))
    specs = {"given": small, "taken": small}
    given = np.array([[1, 2, 3]], np.float32)
    with current_gpu():
        outputs = runner.run({"given": given}, specs, copy_given)
    np.testing.assert_array_equal(outputs["taken"], given)


def test_concurrent_batches_do_not_mix(runner: BatchRunner) -> None:
    with ThreadPoolExecutor(6) as threads:
        results = list(threads.map(lambda seed: run(runner, batch(seed)), range(60)))
    for seed, result in enumerate(results):
        np.testing.assert_array_equal(result, batch(seed))


def test_failed_launch_leaves_the_runner_usable(runner: BatchRunner) -> None:
    def refuse(addresses: Mapping[str, int], stream: int) -> None:
        raise ValueError("refused")

    for _ in range(4):
        with pytest.raises(ValueError, match="refused"):
            run(runner, batch(1), refuse)
    np.testing.assert_array_equal(run(runner, batch(2)), batch(2))


def test_batch_is_copied_in_while_another_computes(runner: BatchRunner) -> None:
    with current_gpu():
        flag = cuda.pagelocked_empty(1, np.uint32)
        seen, probe = cuda.pagelocked_empty(SPEC.shape, SPEC.dtype), cuda.Stream()
    flag[0] = 0
    first_computes = threading.Event()
    arrived = []

    def compute_until_flagged(addresses: Mapping[str, int], stream: int) -> None:
        wait = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        (status,) = driver.cuStreamWaitValue32(stream, flag.ctypes.data, 1, wait.value)
        assert status == driver.CUresult.CUDA_SUCCESS
        copy_given(addresses, stream)
        first_computes.set()

    def watch_arrival(addresses: Mapping[str, int], stream: int) -> None:
        deadline, given = time.monotonic() + 30, batch(2)
        try:
            while not arrived and time.monotonic() < deadline:
                cuda.memcpy_dtoh_async(seen, addresses["given"], probe)
                probe.synchronize()
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


def test_torch_can_use_the_gpu_as_well(runner: BatchRunner) -> None:
    numbers = torch.arange(10, device="cuda")
    np.testing.assert_array_equal(run(runner, batch(1)), batch(1))
    assert int(numbers.sum()) == 45
