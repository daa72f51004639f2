"""Real processes: their items and deaths, memory and CPU use; the description of the machine."""

import json
import mmap
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from multiprocessing import active_children

import pytest

from maskrcnn_trt.benchmarks.common.machine import describe_machine
from maskrcnn_trt.benchmarks.common.processes import (
    ProcessError,
    call_in_processes,
    iterate_in_process,
    measure_process_usage,
    peak_memory_mib,
    reset_peak_memory,
)
from maskrcnn_trt.model.bundle.manifest import BundleError

# A child process of a child process that reports when it holds 200 MiB, and then is busy.
_BUSY = "x = bytearray(200 << 20)\nprint(flush=True)\nwhile True: pass"
_PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {_BUSY!r}])"


def yield_process_ids(count: int) -> Iterator[tuple[int, int]]:
    for i in range(count):
        yield i, os.getpid()


def exit_after(count: int) -> Iterator[int]:
    yield from range(count)
    os._exit(3)


def test_items_come_from_one_child_process():
    items = list(iterate_in_process(yield_process_ids, 3))
    assert [i for i, _ in items] == [0, 1, 2]
    assert len({process for _, process in items} - {os.getpid()}) == 1


def test_items_before_a_crash_are_kept():
    items = iterate_in_process(exit_after, 2)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(ProcessError, match="exit code 3"):
        next(items)


def exit_during_an_item() -> Iterator[bytes]:
    yield b"sent"
    threading.Timer(0.1, os._exit, (3,)).start()
    # More than a pipe holds, so the process still sends it when it exits.
    yield bytes(1 << 20)


def test_a_process_that_dies_while_it_sends_an_item_is_an_error() -> None:
    items = iterate_in_process(exit_during_an_item)
    assert next(items) == b"sent"
    while active_children():
        time.sleep(0.05)
    with pytest.raises(ProcessError, match="exit code 3"):
        next(items)


def raise_after(count: int, error: Exception) -> Iterator[int]:
    yield from range(count)
    raise error


@pytest.mark.parametrize("error", [BundleError("no fp16 torch artifact"), EOFError("no data")])
def test_error_of_the_function_arrives_as_itself(error: Exception) -> None:
    items = iterate_in_process(raise_after, 1, error)
    assert next(items) == 0
    with pytest.raises(type(error), match=str(error)) as caught:
        next(items)
    assert "in raise_after" in caught.value.__notes__[0]


def test_process_ends_with_its_reader():
    items = iterate_in_process(yield_process_ids, 10**9)
    _, process = next(items)
    items.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def wait_or_raise(seconds: float, error: Exception | None) -> int:
    time.sleep(seconds)
    if error:
        raise error
    return os.getpid()


def test_calls_run_in_processes_of_their_own() -> None:
    results = call_in_processes(wait_or_raise, [(0.2, None), (0, None)])
    assert len({os.getpid(), *results}) == 3


def test_a_failed_call_ends_the_others() -> None:
    with pytest.raises(LookupError, match="no such file"):
        call_in_processes(wait_or_raise, [(600, None), (0, LookupError("no such file"))])
    assert not active_children()


def test_a_killed_call_is_an_error() -> None:
    with pytest.raises(ProcessError):
        call_in_processes(os._exit, [(3,)])


def test_peak_memory_lasts_until_reset():
    reset_peak_memory()
    before = peak_memory_mib("cpu")
    # A mapping has fresh pages; an array might get freed ones.
    with mmap.mmap(-1, 100 << 20) as block:
        for offset in range(0, len(block), mmap.PAGESIZE):
            block[offset] = 1
        during = peak_memory_mib("cpu")
    assert during - before > 90
    assert peak_memory_mib("cpu") - before > 90
    reset_peak_memory()
    assert peak_memory_mib("cpu") < during - 50


def test_usage_includes_child_processes() -> None:
    command = [sys.executable, "-c", _PARENT]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            now = time.monotonic()
            usage = measure_process_usage(process.pid, now, now + 0.5)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert usage.cores > 0
    assert usage.memory_mib[-1] > 200
    busiest = usage.threads[0]
    assert (busiest.process, busiest.name, busiest.threads) == (1, "main", 1)
    assert sum(thread.cores for thread in usage.threads) == pytest.approx(usage.cores, abs=0.2)
    # The process has ended.
    now = time.monotonic()
    with pytest.raises(ProcessError, match="ended"):
        measure_process_usage(process.pid, now, now + 0.05)


def test_usage_includes_processes_that_start_or_end_meanwhile() -> None:
    code = "import subprocess, sys\nwhile True: subprocess.run([sys.executable, '-c', LOOP])"
    loop = "import time\nend = time.monotonic() + 0.2\nwhile time.monotonic() < end: pass"
    with subprocess.Popen([sys.executable, "-c", code.replace("LOOP", repr(loop))]) as process:
        try:
            now = time.monotonic()
            usage = measure_process_usage(process.pid, now, now + 1)
        finally:
            process.kill()
    # Each child uses CPU time. At the end, all but the latest child have ended.
    assert usage.cores > 0.2


def test_machine_is_described_in_json():
    machine = json.loads(json.dumps(asdict(describe_machine())))
    assert machine["python"] == platform.python_version()
    assert machine["packages"]["onnxruntime"] == metadata.version("onnxruntime")
    assert machine["cpu"]
    assert machine["cores"] >= 1
