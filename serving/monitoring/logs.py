"""The server's log: lines of text or of JSON, each of which names the request it is about."""

import contextlib
import json
import logging
import os
import re
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from io import FileIO
from queue import Full, Queue
from threading import Thread
from typing import Final
from uuid import uuid4

from .. import LOGGER
from ..config import LogFormat, LogLevel

request_id: Final = ContextVar("request_id", default="")
"""Of the request in progress; empty where there is none."""

_STANDARD_ERROR: Final = 2
"""Handle of the stream; `sys.stderr` may have been replaced."""

_ID: Final = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
"""What is taken for the id of a request; the rest could write lines of its own into the log."""

_BACKLOG: Final = 10_000
"""Lines that wait to be written; more are dropped."""
_FLUSH_S: Final = 1.0

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""What every record has; the rest was said to be logged."""


def name_call(client_id: str) -> str:
    """Give the call that the present task is for the id that its client sent, or one of our own.

    Returns:
        The id, by which the log names the call from here on.
    """
    own = client_id if _ID.fullmatch(client_id) else uuid4().hex
    request_id.set(own)
    return own


def name_request(message_id: str) -> None:
    """Add what the client calls a request, if it does, to the id of the call that it came by."""
    if _ID.fullmatch(message_id):
        request_id.set(f"{request_id.get()}/{message_id}")


def configure_logs(log_format: LogFormat, level: LogLevel) -> None:
    """Log what this package says from a level on, and warnings of others, to standard error."""
    _reopen_closed_streams()
    handler = _Handler()
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    handler.addFilter(_add_request_id)
    logging.basicConfig(handlers=[handler])
    logging.getLogger(LOGGER).setLevel(level.upper())


def _reopen_closed_streams() -> None:
    """Let standard streams that were closed lead nowhere.

    Otherwise connections would get their numbers, and what libraries have to say.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), mode))  # noqa: SIM115 (for good)


class _Handler(logging.Handler):
    """Writes to standard error in a thread of its own, and drops what it cannot write.

    So neither a full disk nor a pipe that nobody reads holds up or ends the server.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines = Queue[bytes](_BACKLOG)
        Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record).encode(errors="backslashreplace")
        except Exception:
            self.handleError(record)
        else:
            with contextlib.suppress(Full):
                self._lines.put_nowait(line + b"\n")

    def flush(self) -> None:
        """Wait until all is written, but not for long; done when the process exits."""
        written = self._lines.all_tasks_done
        with written:
            written.wait_for(lambda: not self._lines.unfinished_tasks, _FLUSH_S)

    def _write(self) -> None:
        with FileIO(_STANDARD_ERROR, "w", closefd=False) as file:
            while True:
                with contextlib.suppress(OSError):
                    file.write(self._lines.get())
                self._lines.task_done()


def _add_request_id(record: logging.LogRecord) -> bool:
    if own := request_id.get():
        record.request_id = own
    return True


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        line = super().formatMessage(record)
        return f"{line} [{own}]" if (own := getattr(record, "request_id", "")) else line


class _JsonFormatter(logging.Formatter):
    """An object a line, in which time is that of RFC 3339, and what else was said stands apart."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
