"""Results of a server under load, computed from the logs of the client processes."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import median

import numpy as np

from ...model.plurals import counted
from ..common.processes import ProcessUsage
from ..common.timing import Latency, latency_from_seconds, percentile
from .load import ClientLog, ClosedLoop, HttpLoop, Load, LoadWindow, RequestLog


class NoAnswerError(Exception):
    """No request to the server succeeded during a measurement."""


@dataclass(frozen=True)
class RequestTimes:
    """Mean milliseconds of a request in each stage. The stages' sum is the mean latency."""

    decode: float
    queue: float
    infer: float
    encode: float
    # Time outside these stages: network, gRPC, the server's event loop, and the client.
    rest: float


STAGES = tuple(field.name for field in fields(RequestTimes))


@dataclass(frozen=True)
class Failures:
    """Number and latency of the requests that failed with one gRPC or HTTP status."""

    # Name of the gRPC status, or `HTTP` and the status code.
    status: str
    requests: int
    latency: Latency


@dataclass(frozen=True)
class ClientUse:
    """CPU use of the client processes, and delay with which they sent their requests."""

    # CPU time of the busiest process divided by the wall-clock time.
    cores: float
    # 99th percentile of the delay between due time and sending, in milliseconds.
    lag: float
    # CPU time of all processes together divided by the wall-clock time.
    total_cores: float


@dataclass(frozen=True)
class ServeResult:
    """Throughput, latency and resource use of a server under one load."""

    # Maximum batch size of the server.
    max_batch: int
    load: Load
    # Images whose planned sending time is within the measurement ("due" images), per second.
    offered_per_second: float
    # Images whose detections arrived within the measurement, per second.
    images_per_second: float
    # Mean number of batches that the backend computed at the same time.
    batches_at_once: float
    # Number of requests that were due within the measurement and were answered with detections,
    # some of them after the end of the measurement.
    requests: int
    # Latency of the answered requests, from the time at which each was due.
    latency: Latency
    # Mean size of the batch that contained a request, over all answered requests.
    mean_batch_size: float
    times: RequestTimes
    # Requests that were due within the measurement and ended without detections, by status.
    failures: list[Failures]
    client: ClientUse
    # Resource use of the server. None: unknown, because the benchmark did not start the server.
    server: ProcessUsage | None

    @property
    def failed_requests(self) -> int:
        """Number of failed requests that were due within the measurement."""
        return sum(failures.requests for failures in self.failures)

    @property
    def server_memory_mib(self) -> tuple[float, float] | None:
        """Server's median memory in MiB in the first and in the last fifth of the measurement.

        None: the server's memory was not measured.
        """
        if self.server is None:
            return None
        memory = self.server.memory_mib
        fifth = max(1, len(memory) // 5)
        return median(memory[:fifth]), median(memory[-fifth:])


def result_from_logs(
    logs: Sequence[ClientLog],
    load: Load,
    window: LoadWindow,
    max_batch: int,
    server: ProcessUsage | None,
) -> ServeResult:
    """Compute a result from the logs of all client processes.

    Args:
        logs: Logs, one per client process.
        load: Total load of all client processes.
        window: Times of the measurement.
        max_batch: Maximum batch size of the server.
        server: Resource use of the server during the measurement. None: it is unknown.

    Raises:
        NoAnswerError: no request that was due within the measurement succeeded, or no successful
            response arrived during the measurement.
    """
    seconds = window.end - window.start
    requests = [request for log in logs for request in log.requests]
    completed = [
        r for r in requests if r.status == "OK" and window.start <= r.received < window.end
    ]
    due = [r for r in requests if r.due >= window.start]
    answered, failed = _by_outcome(due)
    if not answered or not completed:
        if failed and not answered:
            raise NoAnswerError(
                f"all requests that were due in a measurement failed with {', '.join(failed)}; "
                "check that the server still runs, lower the load, or raise --timeout"
            )
        raise NoAnswerError(
            f"the server answered no request within {seconds:g} s; measure longer with --seconds"
        )
    *stages_us, mean_batch_size = np.mean([r.timing for r in answered], axis=0).tolist()
    decode, queue, infer, encode = (us / 1000 for us in stages_us)
    latency = _latency_of(answered)
    lag_ms = percentile(sorted(1000 * (r.sent - r.due) for r in due), 99)
    # Divide the backend time of a batch among its requests, so that each batch counts once.
    timings = (r.timing for r in completed)
    backend_s = sum(infer_us / size for _, _, infer_us, _, size in timings) / 1e6
    cpu_s = [log.cpu_s for log in logs]
    rest = latency.mean - (decode + queue + infer + encode)
    return ServeResult(
        max_batch=max_batch,
        load=load,
        offered_per_second=len(due) / seconds,
        images_per_second=len(completed) / seconds,
        batches_at_once=backend_s / seconds,
        requests=len(answered),
        latency=latency,
        mean_batch_size=mean_batch_size,
        times=RequestTimes(decode, queue, infer, encode, rest),
        failures=[Failures(s, len(r), _latency_of(r)) for s, r in sorted(failed.items())],
        client=ClientUse(max(cpu_s) / seconds, lag_ms, sum(cpu_s) / seconds),
        server=server,
    )


def _by_outcome(
    requests: Sequence[RequestLog],
) -> tuple[list[RequestLog], dict[str, list[RequestLog]]]:
    """Return the successful requests, and the failed requests by status."""
    by_status = defaultdict(list)
    for request in requests:
        by_status[request.status].append(request)
    return by_status.pop("OK", []), by_status


def _latency_of(requests: Sequence[RequestLog]) -> Latency:
    return latency_from_seconds([r.received - r.due for r in requests])


def own_results(results: Sequence[ServeResult]) -> list[ServeResult]:
    """Return the results of the server under test, without those of a baseline server.

    The first result is of the server under test. Results with another `max_batch` are of a baseline
    server.
    """
    return [r for r in results if r.max_batch == results[0].max_batch]


def fastest(results: Sequence[ServeResult], *, streamed: bool = False) -> ServeResult | None:
    """Return the closed-loop gRPC result with the highest throughput, or None if there is none.

    `streamed` states whether to consider loads over gRPC streams, or loads of unary calls.
    """
    closed = closed_loops(results, streamed=streamed)
    return max(closed, key=lambda r: r.images_per_second, default=None)


def closed_loops(results: Sequence[ServeResult], *, streamed: bool) -> list[ServeResult]:
    """Return the results of closed-loop gRPC loads, either with streams or with unary calls.

    In a closed loop, a client sends its next request when it has received a response.
    """
    loads = ((r, r.load) for r in results)
    # `isinstance` would include HttpLoop, which derives from ClosedLoop.
    return [r for r, load in loads if type(load) is ClosedLoop and load.streamed == streamed]


def load_name(load: Load, best: ServeResult | None = None) -> str:
    """Return a load's name, such as `16 clients` or `poisson 27.0/s (90%)`.

    The percentage is the load's rate relative to the throughput of `best`. If `best` is None, the
    percentage is omitted.
    """
    if isinstance(load, ClosedLoop):
        clients = counted(load.clients, "client")
        over_http = " over HTTP" if isinstance(load, HttpLoop) else ""
        return f"{clients} streamed" if load.streamed else f"{clients}{over_http}"
    share = "" if best is None else f" ({load.rate / best.images_per_second:.0%})"
    return f"{load.arrivals} {load.rate:.1f}/s{share}"
