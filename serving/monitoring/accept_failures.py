"""Warnings about connections that cannot be accepted, because the process lacks resources."""

import errno
import logging
import threading
import time
from typing import Final

_log = logging.getLogger(__name__)

# Errors of `accept` after which asyncio tries again.
_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# Seconds without a failure that end a burst.
_BURST_END_S: Final = 10.0


class AcceptFailures:
    """Log of failures to accept connections, with one warning per burst of failures. Thread-safe.

    A burst ends after 10 s without a failure.
    """

    def __init__(self) -> None:
        self._latest = -_BURST_END_S
        self._lock = threading.Lock()

    def report(self, error: BaseException) -> bool:
        """Return whether `error` reports a lack of resources, such as file descriptors.

        If so, and it is the first such error of a burst, log a warning.
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


# Failures of all ports.
accept_failures: Final = AcceptFailures()


def shorten_accept_failures() -> None:
    """Log one warning per burst of failed `accept` calls, in place of asyncio's tracebacks.

    The function adds a filter to asyncio's logger, which stays there.
    """
    logging.getLogger("asyncio").addFilter(_is_other_failure)


def _is_other_failure(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    # If the server stops after a failure, asyncio's next attempt fails, because the port is closed.
    if message.startswith("Exception in callback BaseSelectorEventLoop._start_serving("):
        return False
    error = record.exc_info[1] if record.exc_info else None
    if error is None or not message.startswith("socket.accept()"):
        return True
    return not accept_failures.report(error)
