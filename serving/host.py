"""Interface to this machine: GPUs, installed packages, child processes, threads, systemd."""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from logging.handlers import QueueHandler
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeVar, TypeVarTuple

from . import LOGGER
from .errors import BackendError

CUDA_VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
# Time limit in seconds for CUDA to list the GPUs.
_CUDA_TIMEOUT_S: Final = 60.0
# Python program that prints the PCI bus ID of each GPU that CUDA lists. CUDA's list respects MIG,
# containers and environment variables.
_BUS_IDS_PROGRAM: Final = """
import ctypes
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    raise SystemExit
count, gpu, bus_id = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(32)
cuda.cuInit(0)
cuda.cuDeviceGetCount(ctypes.byref(count))
for index in range(count.value):
    cuda.cuDeviceGet(ctypes.byref(gpu), index)
    cuda.cuDeviceGetPCIBusId(bus_id, len(bus_id), gpu)
    print(bus_id.value.decode())
"""

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")

# IDs of the running child processes.
_running: Final = set[int]()


def gpu_names() -> tuple[str, ...]:
    """Return `NAME (driver VERSION)` for each NVIDIA GPU. Empty if nvidia-smi fails."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, check=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):  # some containers have an empty nvidia-smi
        return ()
    names = (line.rsplit(", ", 1) for line in result.stdout.splitlines())
    return tuple(f"{name} (driver {driver})" for name, driver in names)


def visible_gpus() -> list[str]:
    """Return the CUDA_VISIBLE_DEVICES entry (index or UUID) of each GPU that CUDA finds.

    Raises:
        BackendError: the driver does not respond.
    """
    count = len(gpu_bus_ids())
    names = os.environ.get(CUDA_VISIBLE_DEVICES)
    return names.split(",")[:count] if names else [str(index) for index in range(count)]


def gpu_bus_ids() -> list[str]:
    """Return the PCI bus ID of each GPU that CUDA finds. MIG instances of one GPU share its ID.

    Raises:
        BackendError: the driver does not respond.
    """
    # A separate process loads CUDA, because a process that has loaded CUDA keeps every GPU open.
    command = [sys.executable, "-I", "-S", "-c", _BUS_IDS_PROGRAM]
    try:
        result = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=False, timeout=_CUDA_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise BackendError(
            f"CUDA did not list the GPUs within {_CUDA_TIMEOUT_S:g} s; check whether nvidia-smi "
            "responds, and restart the machine if nvidia-smi hangs"
        ) from None
    return result.stdout.splitlines()


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Map each installed package in `distributions` to its version. No package is imported."""
    versions = {}
    for name in distributions:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def name_thread(name: str) -> None:
    """Set the calling thread's name in top and ps. Linux keeps only the first 15 characters."""
    # Python itself does this only from 3.14 on.
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)


async def in_daemon_thread(work: Callable[..., _Result], *arguments: Any) -> _Result:
    """Run a function in a new daemon thread and return its result.

    Use it for work that may never end, such as reading from a hanging disk or calling a hanging
    driver. Unlike `asyncio.to_thread`, it occupies no thread of a shared pool, and the process can
    exit before the work ends.

    Args:
        work: Function to run. It continues if the calling task is cancelled.
        arguments: Arguments of the function.
    """
    import asyncio  # worker processes start faster without it

    result: Future[_Result] = Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(work(*arguments))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=work.__qualname__, daemon=True).start()
    return await asyncio.wrap_future(result)


def call_in_parallel(functions: Sequence[Callable[[], object]]) -> None:
    """Call each function in its own thread, and wait for all of them.

    If functions raise errors, the error of the first of them is raised after all have ended.
    """
    with ThreadPoolExecutor(max(1, len(functions))) as threads:
        list(threads.map(lambda function: function(), functions))


def notify_service_manager(state: str) -> None:
    """Send systemd a state, such as READY=1, if this process is a service of type notify."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with (
        contextlib.suppress(OSError),  # without the message, systemd itself reports a timeout
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection,
    ):
        if address.startswith("@"):  # an abstract address, which begins with a zero byte
            address = f"\0{address[1:]}"
        connection.sendto(state.encode(), address)


def child_process_ids() -> set[int]:
    """Return the process IDs of the running `ChildProcess` children of this process."""
    return set(_running)


class ChildProcess:
    """Handle of a Python child process that runs one function.

    The parent process logs the child's log records. When the parent ends or is killed, the child
    ends too. The child blocks SIGINT, SIGTERM and SIGHUP, so that only the parent handles them:
    Ctrl+C in a terminal sends SIGINT to the parent and to its child processes.
    """

    def __init__(
        self,
        name: str,
        main: Callable[[*_Arguments], None],
        arguments: tuple[*_Arguments],
        handles: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        cores: Set[int] | None = None,
    ) -> None:
        """Start the child process.

        Args:
            name: Name of the process in messages. top and ps show its first 15 characters.
            main: Module-level function to run.
            arguments: Arguments of `main`: numbers, strings, None, and lists and tuples of these.
            handles: File descriptors that the process inherits, under the same numbers.
            environment: Environment variables to set in addition to the parent's.
            cores: Indices of the CPU cores that the process may use. None: the parent's cores.
        """
        self._name = name
        self._log, log = Pipe()
        level = logging.getLogger(LOGGER).getEffectiveLevel()
        program = (
            # The affinity comes first, because libraries count cores and start threads on import.
            f"import os; os.sched_setaffinity(0, {sorted(cores or os.sched_getaffinity(0))}); "
            f"import sys; sys.path[:] = {sys.path}; "
            f"from {__name__} import attach_to_parent; "
            f"attach_to_parent({log.fileno()}, {level}, {name!r}); "
            f"from {main.__module__} import {main.__name__}; {main.__name__}(*{arguments!r})"
        )
        with _block_stop_signals():
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                env={**os.environ, **(environment or {})},
                pass_fds=[*handles, log.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # stderr: libraries must not print to the server's stdout
            )
        log.close()
        _running.add(self.pid)
        # Completes when the process ends. The result is a message with its exit status or signal.
        self.exited: Future[str] = Future()
        self.exited.set_running_or_notify_cancel()  # a cancelled waiter must not cancel the future
        threading.Thread(target=self._forward_log, name=f"{name} log", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process ID of the child process."""
        return self._process.pid

    def kill(self) -> None:
        """Kill the child process with SIGKILL."""
        self._process.kill()

    def _forward_log(self) -> None:
        """Log the child's log records until the child ends. Then complete the future `exited`."""
        try:
            while record := self._log.recv():
                logger = logging.getLogger(record.name)
                if logger.isEnabledFor(record.levelno):
                    logger.handle(record)
        except (EOFError, OSError):
            self._log.close()
        finally:
            status = self._process.wait()
            _running.discard(self.pid)
            how = f"exit status {status}" if status >= 0 else signal.strsignal(-status)
            self.exited.set_result(f"{self._name} {self.pid} ended: {how}")


@contextlib.contextmanager
def _block_stop_signals() -> Iterator[None]:
    """Block SIGINT, SIGTERM and SIGHUP in this thread within the `with` block.

    A child process that is started in the block keeps the signals blocked.
    """
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    )
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def attach_to_parent(log_handle: int, level: int, name: str) -> None:
    """Name this child process, send its log records to its parent, and end it when the parent ends.

    Args:
        log_handle: File descriptor of the connection that carries the log records.
        level: Number of a `logging` level. Log records of `serving` with lower levels are not sent.
        name: Name of the process in top and ps, which show its first 15 characters.
    """
    name_thread(name)
    log = Connection(log_handle)
    logging.root.addHandler(_LogSender(log))
    logging.getLogger(LOGGER).setLevel(level)
    threading.Thread(target=_exit_with_parent, args=(log,), daemon=True).start()


class _LogSender(QueueHandler):
    def __init__(self, log: Any) -> None:  # a connection in place of the handler's queue
        super().__init__(log)

    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # the parent has ended
            self.queue.send(record)  # type: ignore[attr-defined]


def _exit_with_parent(log: Connection) -> None:
    log.poll(None)  # the parent sends nothing, so this returns only when the parent ends
    os._exit(1)
