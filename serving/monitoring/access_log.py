"""Access log: one line per request at level info, sampled under load."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Final

from ..detections import Timing
from ..grpc_status import status_from_error

_log = logging.getLogger(__name__)

# Maximum number of lines per second at level info, for successful and failed requests separately.
_LINES_PER_S: Final = 10


class _Sample:
    """Rate limiter: at most `_LINES_PER_S` log lines per second. Counts the omitted lines."""

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
        # By success. Separate limits, so that successful requests do not displace failed ones.
        self._samples = {True: _Sample(), False: _Sample()}

    def log_request(
        self,
        model: str,
        peer: str,
        failure: BaseException | None,
        *,
        size: int,
        timings: Sequence[Timing],
        elapsed_s: float,
    ) -> None:
        """Log a request.

        Args:
            model: Model name in the request.
            peer: Client address.
            failure: Error of the request. None: the request succeeded.
            size: Size of the request in bytes.
            timings: Timing of each image; empty if the request failed.
            elapsed_s: Seconds from the request's arrival to its response.
        """
        fields: dict[str, object] = {"model": model, "bytes": size, "images": len(timings)}
        if timings:
            slowest = max(timings, key=lambda own: own.queue_us + _compute_us(own))
            fields["queue_ms"] = slowest.queue_us / 1000
            fields["compute_ms"] = _compute_us(slowest) / 1000
        fields["total_ms"] = round(1000 * elapsed_s, 3)
        if _log.isEnabledFor(logging.DEBUG):
            fields["timings"] = [vars(timing) for timing in timings]
        self._log(f"request for {model}", peer, failure, fields)

    def log_rejected_call(self, method: str, peer: str, failure: Exception) -> None:
        """Log a call that was rejected before its request was read."""
        self._log(f"call of {method}", peer, failure, {"method": method})

    def _log(
        self, subject: str, peer: str, failure: BaseException | None, fields: Mapping[str, object]
    ) -> None:
        if not _log.isEnabledFor(logging.INFO):
            return
        omitted = self._samples[failure is None].take()
        if omitted is None:
            return
        extra = {"peer": peer, "status": _status_of(failure), **fields}
        if omitted:
            extra["omitted"] = omitted
        text = f"{subject} from {peer}: {extra['status']}"
        if isinstance(failure, Exception) and str(failure):
            extra["error"] = str(failure)
        _log.info(
            "%s%s", text, f", {extra['total_ms']} ms" if "total_ms" in extra else "", extra=extra
        )


def _compute_us(timing: Timing) -> int:
    return timing.decode_us + timing.infer_us + timing.encode_us


def _status_of(failure: BaseException | None) -> str:
    if failure is None:
        return "OK"
    return status_from_error(failure).name if isinstance(failure, Exception) else "CANCELLED"
