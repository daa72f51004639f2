"""Log of the server: formats, request IDs, access log, warnings about failed `accept` calls."""

import contextlib
import errno
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from io import FileIO
from queue import Full, Queue
from typing import Final

from .. import LOGGER
from ..config import LogFormat, LogLevel
from ..detections import Timing
from ..grpc_status import status_from_error, truncate_message

_log = logging.getLogger(__name__)

# ID of the call or request that the current task processes. Empty: the task processes none.
request_id: Final = ContextVar("request_id", default="")

# File descriptor of standard error. `sys.stderr` may have been replaced.
_STANDARD_ERROR: Final = 2

# Pattern of valid request IDs. In IDs from clients, other characters, such as line breaks, could
# forge log lines.
_ID: Final = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)

# Maximum number of lines that wait to be written; further lines are dropped.
_BACKLOG: Final = 10_000
# Maximum time to write the remaining lines when the process exits, in seconds.
_FLUSH_S: Final = 1.0

# Attributes that every log record has. Additional ones come from the argument `extra`.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

# Maximum number of lines of the access log per second, unless the log level is debug. The limit
# applies to successful and to failed requests separately.
_LINES_PER_S: Final = 10

# `errno` values of failed `accept` calls that asyncio repeats after a pause.
_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# Seconds without a failed `accept` call after which a burst of failures counts as ended.
_BURST_END_S: Final = 10.0


def set_request_id(client_id: str) -> str:
    """Set the request ID for log records of the current asyncio task, and return it.

    Args:
        client_id: Request ID that the client sent. If it is empty or invalid, a random ID is set.
    """
    call_id = client_id if client_id and _ID.fullmatch(client_id) else os.urandom(16).hex()
    request_id.set(call_id)
    return call_id


def extend_request_id(message_id: str) -> None:
    """Append `/MESSAGE_ID` to the request ID in log records of the current asyncio task.

    Args:
        message_id: ID in the request message. If it is empty or invalid, nothing is appended.
    """
    if message_id and _ID.fullmatch(message_id):
        request_id.set(f"{request_id.get()}/{message_id}")


def configure_logs(log_format: LogFormat, level: LogLevel) -> None:
    """Log to stderr. Minimum level: `level` for the package `serving`, WARNING for all others."""
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
        threading.Thread(target=self._write, name="log", daemon=True).start()

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
        if omitted := getattr(record, "omitted", 0):
            line += f" (earlier lines omitted: {omitted})"
        request = getattr(record, "request_id", "")
        return f"{line} [{request}]" if request else line


class _JsonFormatter(logging.Formatter):
    """Formatter of one JSON object per line, with RFC 3339 time and the `extra` attributes."""

    def format(self, record: logging.LogRecord) -> str:
        created = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": created.replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Sample:
    """Rate limiter: at most `_LINES_PER_S` log lines per second. Counts the omitted lines.

    At log level debug, there is no limit.
    """

    def __init__(self) -> None:
        self._second = 0
        self._lines = 0
        # Lines omitted since the last logged line.
        self._omitted = 0

    def take(self) -> int | None:
        """Decide whether the caller may log a line.

        Returns:
            Number of lines that were omitted since the last logged line. None: the caller must not
            log the line.
        """
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._lines = second, 0
        if self._lines >= _LINES_PER_S and not _log.isEnabledFor(logging.DEBUG):
            self._omitted += 1
            return None
        self._lines += 1
        omitted, self._omitted = self._omitted, 0
        return omitted


class AccessLog:
    """Log of requests, with client, status, sizes and times."""

    def __init__(self) -> None:
        # Rate limiters of successful (True) and of failed requests (False). They are separate, so
        # that log lines of successful requests do not displace those of failed ones.
        self._samples = {True: _Sample(), False: _Sample()}

    def log_request(
        self,
        model: str | None,
        peer: str,
        failure: BaseException | None,
        *,
        size: int,
        timings: Sequence[Timing],
        elapsed_s: float,
    ) -> None:
        """Log a request.

        Args:
            model: Model name under which the request is recorded. None: the requested model is not
                served.
            peer: Client address.
            failure: Error of the request. None: the request succeeded.
            size: Size of the request in bytes.
            timings: Timing of each image; empty if the request failed.
            elapsed_s: Seconds from the request's arrival to its response.
        """
        omitted = self._take(failure)
        if omitted is None:
            return
        fields: dict[str, object] = {"bytes": size, "images": len(timings)}
        if model:
            fields["model"] = model
        if timings:
            slowest = max(timings, key=lambda own: own.queue_us + _compute_us(own))
            fields["queue_ms"] = slowest.queue_us / 1000
            fields["compute_ms"] = _compute_us(slowest) / 1000
        fields["total_ms"] = round(1000 * elapsed_s, 3)
        if _log.isEnabledFor(logging.DEBUG):
            fields["timings"] = [vars(timing) for timing in timings]
        self._log(f"request for {model or 'an unknown model'}", peer, failure, fields, omitted)

    def log_rejected_call(self, method: str, peer: str, failure: Exception) -> None:
        """Log a call that was rejected, perhaps before the server knew its model."""
        omitted = self._take(failure)
        if omitted is not None:
            self._log(f"call of {method}", peer, failure, {"method": method}, omitted)

    def _take(self, failure: BaseException | None) -> int | None:
        """Decide whether to log a line, and count it as logged or omitted.

        `failure` is the error that the line reports. Return the number of lines that were omitted
        before this one, or None to omit this one too.
        """
        if not _log.isEnabledFor(logging.INFO):
            return None
        return self._samples[failure is None].take()

    def _log(
        self,
        subject: str,
        peer: str,
        failure: BaseException | None,
        fields: Mapping[str, object],
        omitted: int,
    ) -> None:
        extra = {"peer": peer, "status": _status_of(failure), **fields}
        if omitted:
            extra["omitted"] = omitted
        text = f"{subject} from {peer}: {extra['status']}"
        if isinstance(failure, Exception) and str(failure):
            # An error message may quote a name from the request. The name can have megabytes.
            extra["error"] = truncate_message(str(failure))
        _log.info(
            "%s%s", text, f", {extra['total_ms']} ms" if "total_ms" in extra else "", extra=extra
        )


def _compute_us(timing: Timing) -> int:
    return timing.decode_us + timing.infer_us + timing.encode_us


def _status_of(failure: BaseException | None) -> str:
    if failure is None:
        return "OK"
    return status_from_error(failure).name if isinstance(failure, Exception) else "CANCELLED"


class AcceptFailures:
    """Log of failures to accept connections, with one warning per burst of failures. Thread-safe.

    A burst ends after 10 s without a failure.
    """

    def __init__(self) -> None:
        self._latest = -_BURST_END_S
        self._lock = threading.Lock()

    def report(self, error: BaseException) -> bool:
        """Return whether `error` reports a lack of resources, such as file descriptors.

        If `error` is the first such error of a burst, log a warning.
        """
        if not isinstance(error, OSError) or error.errno not in _SHORTAGES:
            return False
        with self._lock:
            now = time.monotonic()
            is_first, self._latest = now - self._latest >= _BURST_END_S, now
        if is_first:
            _log.warning(
                "new connections must wait (%s); raise the limit of open files with ulimit -n, or "
                "set a lower max_connections",
                error.strerror,
            )
        return True


# Log of the failed `accept` calls of all ports.
accept_failures: Final = AcceptFailures()


def shorten_accept_failures() -> None:
    """Log one warning per burst of failed `accept` calls, in place of asyncio's tracebacks.

    The function adds a filter to asyncio's logger. The filter is never removed.
    """
    logging.getLogger("asyncio").addFilter(_is_other_failure)


def _is_other_failure(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    # If the server stops after a failed `accept` call, asyncio's next attempt to accept connections
    # fails too, because the port is closed.
    if message.startswith("Exception in callback BaseSelectorEventLoop._start_serving("):
        return False
    error = record.exc_info[1] if record.exc_info else None
    if error is None or not message.startswith("socket.accept()"):
        return True
    return not accept_failures.report(error)
