"""Servers in separate processes, and clients that keep them under load."""

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb

Process = subprocess.Popen[str]


@contextlib.contextmanager
def starting_server(bundle: Path, log: Path, *options: str) -> Iterator[Process]:
    """Run a server in a process group of its own until the block ends. It logs to a file."""
    command = [sys.executable, "-m", "maskrcnn_trt", "serve", str(bundle), "--port", "0", *options]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, process_group=0
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def server_process(bundle: Path, log: Path, *options: str) -> Iterator[tuple[Process, str]]:
    """Start a server, wait until it is ready, and yield its process and address."""
    with starting_server(bundle, log, *options) as process:
        assert process.stdout is not None
        match = re.search(r"Ready at (\S+:\d+)", process.stdout.readline())
        assert match, log.read_text()
        yield process, match[1]


def memory_of(pid: int) -> int:
    """Return the anonymous memory of a process in bytes."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    match = re.search(r"Anonymous:\s+(\d+) kB", text)
    assert match
    return int(match[1]) << 10


def peak_memory_of(pid: int) -> int:
    """Return the peak memory of a process in bytes."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match
    return int(match[1]) << 10


def worker_pids(server: int) -> set[int]:
    """Return the process IDs of a server's workers."""
    return _child_pids(server, b"run_worker")


def front_end_pids(server: int) -> set[int]:
    """Return the process IDs of a server's front ends."""
    return _child_pids(server, b"run_front_end")


def _child_pids(parent: int, function: bytes) -> set[int]:
    return {
        int(folder.name)
        for folder in Path("/proc").glob("[0-9]*")
        if _runs(folder, function) and _parent_of(folder) == parent
    }


def _runs(folder: Path, function: bytes) -> bool:
    with contextlib.suppress(OSError):
        return function in (folder / "cmdline").read_bytes()
    return False


def _parent_of(folder: Path) -> int | None:
    with contextlib.suppress(OSError):
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    return None


class Load:
    """Load on a server from threads. Each sends one request after the other, in one precision."""

    def __init__(self, stub: Any, image: bytes, precisions: Sequence[str] = ("fp32",) * 3) -> None:
        self.completed = 0
        self.failures: list[grpc.RpcError] = []
        self._stub = stub
        self._image = image
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._send_requests, args=(precision,))
            for precision in precisions
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Send no more requests, and wait for the pending responses."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def wait_for_responses(self, count: int = 10) -> None:
        """Wait until `count` more requests have succeeded."""
        enough = self.completed + count
        wait_until(lambda: self.completed >= enough)

    def _send_requests(self, precision: str) -> None:
        while not self._stopping.is_set():
            request = pb.DetectRequest(image=self._image, precision=precision)
            try:
                assert self._stub.Detect(request, timeout=60).detections
                self.completed += 1
            except grpc.RpcError as error:
                self.failures.append(error)
            time.sleep(0.06)  # leaves CPU time to a model reload that the test runs


def wait_until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)
