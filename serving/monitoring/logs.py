"""Log of the server: lines of text or JSON, each with the ID of the request that caused it."""

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
from secrets import token_hex
from threading import Thread
from typing import Final

from .. import LOGGER
from ..config import LogFormat, LogLevel

# ID of the call or request that the current task processes. Empty: the task processes none.
request_id: Final = ContextVar("request_id", default="")

# File descriptor of standard error. `sys.stderr` may have been replaced.
_STANDARD_ERROR: Final = 2

# Valid IDs from clients. Other characters, such as line breaks, could forge log lines.
_ID: Final = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)

# Maximum number of lines that wait to be written; further lines are dropped.
_BACKLOG: Final = 10_000
# Maximum time to write the remaining lines when the process exits, in seconds.
_FLUSH_S: Final = 1.0

# Attributes that every log record has. Additional ones come from the argument `extra`.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def name_call(client_id: str) -> str:
    """Set the request ID for log records of the current asyncio task, and return it.

    Args:
        client_id: Request ID that the client sent. If it is empty or invalid, a random ID is set.
    """
    call_id = client_id if client_id and _ID.fullmatch(client_id) else token_hex(16)
    request_id.set(call_id)
    return call_id


def name_request(message_id: str) -> None:
    """Append `/MESSAGE_ID` to the request ID in log records of the current asyncio task.

    Args:
        message_id: ID in the request message. If it is empty or invalid, nothing is appended.
    """
    if message_id and _ID.fullmatch(message_id):
        request_id.set(f"{request_id.get()}/{message_id}")


def configure_logs(log_format: LogFormat, level: LogLevel) -> None:
    """Log to stderr: `serving` at `level` and above, other packages at WARNING and above."""
    _reopen_closed_streams()
    handler = _BackgroundHandler()
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    handler.addFilter(_add_request_id)
    logging.basicConfig(handlers=[handler])
    logging.getLogger(LOGGER).setLevel(level.upper())


def _reopen_closed_streams() -> None:
    """Redirect closed standard streams to /dev/null."""
    # Otherwise a new connection could get the file descriptor of standard error, and receive the
    # text that libraries write there.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), mode))  # noqa: SIM115 (stays open)


class _BackgroundHandler(logging.Handler):
    """Log handler that writes to standard error in a thread, and drops lines it cannot write.

    A full disk or a blocked pipe therefore neither delays nor ends the server.
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
        """Wait up to one second until the queued lines are written. Called at process exit."""
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
    if current := request_id.get():
        record.request_id = current
    return True


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        line = super().formatMessage(record)
        if error := getattr(record, "error", ""):
            # A message may quote the request. Line breaks could forge log lines.
            line += f": {error!r}" if not str(error).isprintable() else f": {error}"
        request = getattr(record, "request_id", "")
        return f"{line} [{request}]" if request else line


class _JsonFormatter(logging.Formatter):
    """Formatter of one JSON object per line, with RFC 3339 time and the `extra` attributes."""

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
