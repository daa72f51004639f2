"""Worker processes. Each runs one engine; its crash or hang does not affect the server."""

import contextlib
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Generic, NamedTuple, Self, TypeVar

from .. import LOGGER
from ..errors import BackendDownError, BackendError
from ..host import CUDA_VISIBLE_DEVICES, visible_gpus
from ..steps.base import EngineInfo, EngineLoader
from .worker_process import Channel, run_worker

Item = TypeVar("Item")
Result = TypeVar("Result")

_log = logging.getLogger(__name__)

# Time limit in seconds for each wait in `WorkerProcess.close`. After it the process is killed.
_CLOSE_TIMEOUT_S = 10.0


class WorkerResources(NamedTuple):
    """CPU cores and GPU that a worker process may use."""

    # Environment variables that select the GPU.
    environment: Mapping[str, str]
    # Indices of the CPU cores.
    cores: Set[int]
    # Index of the GPU among those that CUDA shows to the server. None: the machine has no GPU.
    gpu: int | None = None
    # Whether the worker exists only because the machine has several GPUs.
    is_for_gpu: bool = False


def assign_resources(workers: int | None) -> list[WorkerResources]:
    """Divide GPUs and CPU cores among workers.

    Args:
        workers: Number of workers. None: one per GPU, or one if the machine has no GPU.

    Raises:
        BackendError: the GPU driver does not respond.
    """
    cores = sorted(os.sched_getaffinity(0))
    gpus = visible_gpus()
    if gpus:
        # Workers on a GPU use little CPU time, so they share all cores.
        return [
            WorkerResources(
                {CUDA_VISIBLE_DEVICES: gpus[index % len(gpus)]},
                frozenset(cores),
                gpu=index % len(gpus),
                is_for_gpu=workers is None and index > 0,
            )
            for index in range(workers or len(gpus))
        ]
    count = workers or 1
    shares = [frozenset(cores[index % len(cores) :: count]) for index in range(count)]
    return [WorkerResources({}, share) for share in shares]


class WorkerProcess(Generic[Item, Result]):
    """Handle of a worker process, which runs one engine.

    The process ends with the server, even if the server is killed. It blocks SIGINT, SIGTERM and
    SIGHUP, because Ctrl+C in a terminal reaches the server's child processes too.
    """

    def __init__(
        self,
        loader: EngineLoader[Item, Result],
        resources: WorkerResources,
        hang_timeout_s: float,
    ) -> None:
        """Start the process, which loads the engine.

        Args:
            loader: Loader of the engine.
            resources: CPU cores and GPU of the process.
            hang_timeout_s: Time limit of a batch in seconds. After it the process is killed.
        """
        self._loader = loader
        self.resources = resources
        self._hang_timeout_s = hang_timeout_s
        # Set by `load`.
        self.info: EngineInfo
        # Idle channels to the process, one per concurrent batch.
        self._channels: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self._control, control = Pipe()
        self._log, log = Pipe()
        self._process = _start_process((control, log), resources)
        level = logging.getLogger(LOGGER).getEffectiveLevel()
        with contextlib.suppress(OSError):  # if the process has ended already, `load` reports that
            self._control.send(level)
            self._control.send(loader)
        # Completes when the process ends. The result is a message with its exit status or signal.
        self.exited: Future[str] = Future()
        self.exited.set_running_or_notify_cancel()  # a cancelled waiter must not cancel the future
        threading.Thread(target=self._forward_log, name="engine log", daemon=True).start()

    def successor(self) -> Self:
        """Start a new process with the same engine and resources."""
        return type(self)(self._loader, self.resources, self._hang_timeout_s)

    def load(self) -> None:
        """Wait until the engine is loaded.

        Raises:
            BundleError: the bundle is damaged or lacks the precision.
            BackendError: the backend does not run on this machine or with this batch size, or the
                process ended.
        """
        try:
            reply = self._control.recv()
            if isinstance(reply, Exception):
                raise reply
            self.info = reply
            for _ in range(self.info.concurrency):
                self._channels.put(Channel.receive_from(self._control))
            self._control.close()
        except (EOFError, OSError):
            raise BackendError(
                f"loading the model failed: {self.exited.result()}; see the log for the reason"
            ) from None

    @property
    def is_spare(self) -> bool:
        """Whether the worker was created for an additional GPU, but its engine uses the CPU."""
        return self.resources.is_for_gpu and self.info.device == "cpu"

    def warm_up(self, max_batch: int) -> None:
        """Warm up the engine, without a time limit.

        Raises:
            BackendError: the engine fails, or the process ends.
        """
        self._call("warm_up", max_batch, timeout_s=None)

    def compute(self, items: Sequence[Item]) -> Sequence[Result]:
        """Return one result per item of a batch. All items have the same shape bucket.

        Raises:
            BackendDownError: the process ended, or was killed after `hang_timeout_s`.
            BackendError: the engine failed on the batch.
        """
        results: Sequence[Result] = self._call("compute", items, timeout_s=self._hang_timeout_s)
        return results

    def close(self) -> None:
        """Wait for in-flight batches, close the engine and end the process. Call `load` before."""
        with contextlib.suppress(queue.Empty, OSError):  # TimeoutError is an OSError
            for _ in range(self.info.concurrency):
                self._channels.get(timeout=_CLOSE_TIMEOUT_S).send(None)
            self.exited.result(_CLOSE_TIMEOUT_S)
        self.kill()
        self.exited.result()

    def kill(self) -> None:
        """Kill the process. Methods that are waiting for it raise BackendError."""
        self._process.kill()

    def _call(self, method: str, argument: Any, *, timeout_s: float | None) -> Any:
        channel = self._channels.get()
        try:
            channel.send((method, argument))
            if not channel.poll(timeout_s):
                _log.error(
                    "killing worker process %d: a batch takes longer than hang_timeout_s (%g s)",
                    self._process.pid,
                    timeout_s,
                )
                self.kill()
                raise EOFError
            reply = channel.receive(copy=True)
        except (EOFError, OSError):
            raise BackendDownError(
                "the worker process that computed the batch ended; try again later"
            ) from None
        finally:
            self._channels.put(channel)
            if self.exited.done():
                self._close_channels()
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _forward_log(self) -> None:
        """Log the worker's log records in this process until the worker ends; then set `exited`."""
        try:
            while record := self._log.recv():
                logger = logging.getLogger(record.name)
                if logger.isEnabledFor(record.levelno):
                    logger.handle(record)
        except (EOFError, OSError):
            self._log.close()
        finally:
            status = self._process.wait()
            how = f"exit status {status}" if status >= 0 else signal.strsignal(-status)
            self.exited.set_result(f"worker process {self._process.pid} ended: {how}")
            self._close_channels()

    def _close_channels(self) -> None:
        # Frees their shared memory, although a logged exception may keep this object alive.
        with contextlib.suppress(queue.Empty):  # other threads take channels too
            for _ in range(self._channels.qsize()):
                channel = self._channels.get_nowait()
                channel.close()
                self._channels.put(channel)


def start_workers(
    loader: EngineLoader[Item, Result], resources: Iterable[WorkerResources], hang_timeout_s: float
) -> list[WorkerProcess[Item, Result]]:
    """Start one `WorkerProcess` per entry of `resources`. If one fails to start, kill all."""
    with contextlib.ExitStack() as started:
        processes = []
        for share in resources:
            processes.append(WorkerProcess(loader, share, hang_timeout_s))
            started.callback(processes[-1].kill)
        started.pop_all()
    return processes


def _start_process(
    connections: Sequence[Connection], resources: WorkerResources
) -> subprocess.Popen[bytes]:
    """Start a Python process that runs `run_worker`. It inherits the connections."""
    handles = [connection.fileno() for connection in connections]
    program = (
        # The affinity comes first, because libraries count cores and start threads on import.
        f"import os; os.sched_setaffinity(0, {sorted(resources.cores)}); "
        f"import sys; sys.path[:] = {sys.path}; "
        f"from {run_worker.__module__} import run_worker; run_worker(*{handles})"
    )
    with _block_stop_signals():
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **resources.environment},
            pass_fds=handles,
            stdin=subprocess.DEVNULL,
            stdout=2,  # stderr: libraries must not print to the server's stdout
        )
    for connection in connections:
        connection.close()
    return process


@contextlib.contextmanager
def _block_stop_signals() -> Iterator[None]:
    """Block SIGINT, SIGTERM and SIGHUP within the context, also in processes started there."""
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    )
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
