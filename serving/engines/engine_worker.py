"""The process of an engine, as seen from within.

It begins with a control connection, over which it gets an engine and answers what that is and a
channel for each batch that may be in flight; and with a log connection, over which it sends
records, and whose end tells it that the server is gone.
"""

import contextlib
import logging
import os
import sys
import threading
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection
from typing import Any, Final

from ...model.images import ImageError
from ...model.manifest import BundleError
from .. import LOGGER
from ..errors import BackendError, ServingError
from ..garbage_collection import pass_over_present_objects
from .channels import Channel

_log = logging.getLogger(__name__)

_SWITCH_S: Final = 2e-4
"""After which a thread of Python code makes room for others. Those that keep a GPU busy would wait
for the usual 5 ms, time and again, while another writes answers."""

_SERVER_GONE = (EOFError, ConnectionError)
"""What connections raise then."""


def run_worker(control_handle: int, log_handle: int) -> None:
    """Serve an engine until the server is done with it, or gone."""
    with contextlib.suppress(*_SERVER_GONE):
        control, log = Connection(control_handle), Connection(log_handle)
        level = control.recv()
        sys.setswitchinterval(_SWITCH_S)
        logging.root.addHandler(_LogSender(log))
        logging.getLogger(LOGGER).setLevel(level)
        threading.Thread(target=_end_with_server, args=(log,), daemon=True).start()
        _run_engine(control)


def _run_engine(control: Connection) -> None:
    try:
        engine = control.recv()
        info = engine.load()
    except Exception as error:
        control.send(_portable(error, "the engine could not be loaded"))
        return
    control.send(info)
    threads = [
        threading.Thread(target=_serve, args=(engine, _opened_channel(control)))
        for _ in range(info.concurrency)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.close()


class _LogSender(QueueHandler):
    def __init__(self, log: Any) -> None:  # which sends as a queue puts
        super().__init__(log)

    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(*_SERVER_GONE):
            self.queue.send(record)  # type: ignore[attr-defined]


def _end_with_server(log: Connection) -> None:
    """End the process when the server has ended, however that did."""
    log.poll(None)  # nothing ever comes but the end
    os._exit(1)


def _opened_channel(control: Connection) -> Channel:
    here, there = Channel.pair()
    there.give(control)
    return here


def _serve(engine: Any, channel: Channel) -> None:
    """Do what comes over a channel: the name of a method and its arguments, or none to stop."""
    with contextlib.suppress(*_SERVER_GONE):
        while (call := channel.receive(copy=False)) is not None:
            method, *arguments = call
            try:
                answer = getattr(engine, method)(*arguments)
                if method == "warm_up":
                    pass_over_present_objects()
            except BaseException as error:  # SystemExit too: the thread has to answer
                answer = _portable(error, "a batch failed")
            channel.send(answer)


def _portable(error: BaseException, what: str) -> Exception:
    """An error that means the same in the server; what is no sentence of ours goes to the log."""
    if isinstance(error, (BundleError, ImageError, ServingError)):
        return error
    _log.error("%s", what, exc_info=error)
    return BackendError(f"{what} with {type(error).__name__}: {error}")
