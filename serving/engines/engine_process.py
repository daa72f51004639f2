"""An engine in a process of its own: whatever becomes of it, the server goes on."""

import contextlib
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Generic, Self, TypeVar

from .. import LOGGER
from ..errors import BackendDownError, BackendError
from .base import Engine, EngineInfo
from .channels import Channel
from .engine_worker import run_worker
from .placement import Place

Item = TypeVar("Item")
Result = TypeVar("Result")

_log = logging.getLogger(__name__)

_CLOSING_S = 10.0
"""Time that a process has to finish its batches and close its engine."""


class EngineProcess(Generic[Item, Result]):
    """One life of such a process, which begins at once.

    It ends with the server, however that ends, and only by the server's will or its own fault: it
    does not get the signals that are meant for the server, as those of a terminal.
    """

    def __init__(self, engine: Engine[Item, Result], place: Place, hang_timeout_s: float) -> None:
        """Start the process, in which the engine is loaded.

        Args:
            engine: Not loaded.
            place: What the process may use.
            hang_timeout_s: Time after which a batch is given up, and the process killed.
        """
        self._engine = engine
        self.place = place
        """Where it computes."""
        self._hang_timeout_s = hang_timeout_s
        self.info: EngineInfo
        """What the engine is, once it is loaded."""
        self._channels: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self._control, control = Pipe()
        self._log, log = Pipe()
        self._process = _started_process((control, log), place)
        level = logging.getLogger(LOGGER).getEffectiveLevel()
        with contextlib.suppress(OSError):  # `load` finds out why
            self._control.send(level)
            self._control.send(engine)
        self.exited: Future[str] = Future()
        """How the process ended, once it has."""
        self.exited.set_running_or_notify_cancel()  # who waits for it must not cancel it
        threading.Thread(target=self._pass_log_on, name="engine log", daemon=True).start()

    def successor(self) -> Self:
        """A new process with the same engine in the same place."""
        return type(self)(self._engine, self.place, self._hang_timeout_s)

    def load(self) -> None:
        """Wait for the engine.

        Raises:
            BundleError: the bundle is damaged or lacks the precision.
            BackendError: the backend does not run here, or not with such batches, or the process
                ended.
        """
        try:
            answer = self._control.recv()
            if isinstance(answer, Exception):
                raise answer
            self.info = answer
            for _ in range(self.info.concurrency):
                self._channels.put(Channel.take(self._control))
            self._control.close()
        except (EOFError, OSError):
            raise BackendError(
                f"the model is not loaded, for {self.exited.result()}; the log may say why"
            ) from None

    @property
    def is_spare(self) -> bool:
        """Whether the engine was meant for one of several GPUs, but computes on the CPU."""
        return self.place.is_for_gpu and self.info.device == "cpu"

    def warm_up(self, max_batch: int) -> None:
        """Warm the engine up, however long it takes.

        Raises:
            BackendError: the engine does not compute, or ended the process.
        """
        self._call("warm_up", max_batch, timeout_s=None)

    def compute(self, items: Sequence[Item]) -> Sequence[Result]:
        """A result for each item of a batch, which are of one bucket.

        Raises:
            BackendDownError: the process has ended, or is ended for taking too long.
            BackendError: the engine failed on the batch.
        """
        results: Sequence[Result] = self._call("compute", items, timeout_s=self._hang_timeout_s)
        return results

    def close(self) -> None:
        """End the process, which is loaded, when its batches are computed and its engine closed."""
        with contextlib.suppress(queue.Empty, OSError):  # of which TimeoutError is one
            for _ in range(self.info.concurrency):
                self._channels.get(timeout=_CLOSING_S).send(None)
            self.exited.result(_CLOSING_S)
        self.kill()
        self.exited.result()

    def kill(self) -> None:
        """End the process at once, whatever it does; what waits for it raises."""
        self._process.kill()

    def _call(self, method: str, argument: Any, *, timeout_s: float | None) -> Any:
        channel = self._channels.get()
        try:
            channel.send((method, argument))
            if not channel.poll(timeout_s):
                _log.error(
                    "process %d of the engine takes longer than hang_timeout_s for a batch, and is "
                    "killed",
                    self._process.pid,
                )
                self.kill()
                raise EOFError
            answer = channel.receive(copy=True)
        except (EOFError, OSError):
            raise BackendDownError(
                "the process that computed the batch ended; try again in a while"
            ) from None
        finally:
            self._channels.put(channel)
            if self.exited.done():
                self._close_channels()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _pass_log_on(self) -> None:
        """Let the server's log have what the process logs, until it ends."""
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
            self.exited.set_result(f"process {self._process.pid} of the engine ended: {how}")
            self._close_channels()

    def _close_channels(self) -> None:
        """Close those that nobody uses, for errors may keep this object alive for a while."""
        with contextlib.suppress(queue.Empty):  # others take them, too
            for _ in range(self._channels.qsize()):
                channel = self._channels.get_nowait()
                channel.close()
                self._channels.put(channel)


def start_engines(
    engine: Engine[Item, Result], places: Iterable[Place], hang_timeout_s: float
) -> list[EngineProcess[Item, Result]]:
    """Start a process in each place; the arguments are those of `EngineProcess`."""
    with contextlib.ExitStack() as started:
        processes = []
        for place in places:
            processes.append(EngineProcess(engine, place, hang_timeout_s))
            started.callback(processes[-1].kill)
        started.pop_all()
    return processes


def _started_process(connections: Sequence[Connection], place: Place) -> subprocess.Popen[bytes]:
    """A process that `run_worker`s with connections, which are closed here."""
    handles = [connection.fileno() for connection in connections]
    program = (
        # First of all, as libraries count the cores and start threads when they are imported.
        f"import os; os.sched_setaffinity(0, {sorted(place.cores)}); "
        f"import sys; sys.path[:] = {sys.path}; "
        f"from {run_worker.__module__} import run_worker; run_worker(*{handles})"
    )
    with _server_signals_blocked():
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **place.environment},
            pass_fds=handles,
            stdin=subprocess.DEVNULL,
            stdout=2,  # the server's own is not for what libraries print
        )
    for connection in connections:
        connection.close()
    return process


@contextlib.contextmanager
def _server_signals_blocked() -> Iterator[None]:
    """Let processes that start within the context never get the signals that stop a server."""
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    )
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
