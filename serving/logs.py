"""The server's log: lines of text or of JSON, each of which names the request it is about."""

import json
import logging
import os
import re
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from io import FileIO, TextIOWrapper
from typing import Any, Final
from uuid import uuid4

from .config import LogFormat, LogLevel

request_id: Final = ContextVar("request_id", default="")
"""Of the request in progress; empty where there is none."""

_ID: Final = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
"""What is taken for the id of a request; the rest could write lines of its own into the log."""

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
    logging.getLogger(__package__).setLevel(level.upper())


def _reopen_closed_streams() -> None:
    """Let standard streams that were closed lead nowhere.

    Otherwise connections would get their numbers, and what libraries have to say.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, os.O_RDWR), mode))  # noqa: SIM115 (for good)


class _Handler(logging.StreamHandler[TextIOWrapper]):
    """Writes to standard error without a buffer, and drops what it cannot write.

    On a full disk nothing is kept for later, when it would fail again.
    """

    def __init__(self) -> None:
        raw: Any = FileIO(sys.stderr.fileno(), "w", closefd=False)
        super().__init__(TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (named by the library)
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


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
