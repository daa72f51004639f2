"""Child processes that send their log records to the server and end when the server ends."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from logging.handlers import QueueHandler
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Final, TypeVarTuple

from . import LOGGER
from .host import name_thread

_Arguments = TypeVarTuple("_Arguments")

# IDs of the running child processes.
_running: Final = set[int]()


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
        """Start the process.

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
        """Process ID."""
        return self._process.pid

    def kill(self) -> None:
        """Kill the process."""
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
