"""What a server did under a load."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .latency import Latency, latency_from_seconds, percentile
from .process_usage import ProcessUsage
from .serve_load import Answer, Load, PartLog, Span


class NoAnswerError(Exception):
    """Nothing was answered while it was measured."""


@dataclass(frozen=True)
class RequestTimes:
    """Mean milliseconds of a request by where they went, which together are the mean latency."""

    decode: float
    queue: float
    infer: float
    encode: float
    rest: float
    """Outside these stages of the server: network, gRPC, its event loop, and the client."""


@dataclass(frozen=True)
class Refusals:
    """Requests that ended without detections, all with one status."""

    status: str
    """Name of the gRPC status."""
    requests: int
    latency: Latency


@dataclass(frozen=True)
class ClientUse:
    """Whether the clients kept up."""

    cores: float
    """CPU time by time of the busiest of their processes."""
    lag: float
    """99th percentile of the milliseconds by which requests were sent too late."""


@dataclass(frozen=True)
class ServeResult:
    """One server under one load."""

    max_batch: int
    """The server's."""
    load: Load
    offered_per_second: float
    """Images that were due within the time."""
    images_per_second: float
    """Images whose detections came within the time."""
    batches_at_once: float
    """Batches that the backend had for them, mean over time."""
    requests: int
    """Those due within the time that were answered with detections, whenever that was."""
    latency: Latency
    """Of these, from the moment at which each was due."""
    mean_batch_size: float
    """Of the batches that they were in."""
    times: RequestTimes
    refusals: list[Refusals]
    """Of those due within the time."""
    client: ClientUse
    server: ProcessUsage | None
    """None where the server was not started for the measurement."""


def result_from_logs(
    logs: Sequence[PartLog],
    load: Load,
    span: Span,
    max_batch: int,
    server: ProcessUsage | None,
) -> ServeResult:
    """Sum up what the parts of a load saw.

    Args:
        logs: One a part.
        load: The whole.
        span: When it was sent.
        max_batch: The server's.
        server: What it took meanwhile.

    Raises:
        NoAnswerError: the server gave no detections.
    """
    seconds = span.end - span.start
    answers = [answer for log in logs for answer in log.answers]
    completed = [a for a in answers if a.status == "OK" and span.start <= a.received < span.end]
    due = [answer for answer in answers if answer.due >= span.start]
    answered, refused = _by_outcome(due)
    if not answered or not completed:
        seen = f" with detections, only with {', '.join(refused)}" if refused else ""
        raise NoAnswerError(
            f"no request was answered{seen} within {seconds:g} s; measure longer with --seconds"
        )
    *stages_us, mean_batch_size = np.mean([a.timing for a in answered], axis=0).tolist()
    decode, queue, infer, encode = (us / 1000 for us in stages_us)
    latency = _latency_of(answered)
    rest = latency.mean - (decode + queue + infer + encode)
    return ServeResult(
        max_batch=max_batch,
        load=load,
        offered_per_second=len(due) / seconds,
        images_per_second=len(completed) / seconds,
        batches_at_once=_backend_seconds(completed) / seconds,
        requests=len(answered),
        latency=latency,
        mean_batch_size=mean_batch_size,
        times=RequestTimes(decode, queue, infer, encode, rest),
        refusals=[Refusals(s, len(a), _latency_of(a)) for s, a in sorted(refused.items())],
        client=ClientUse(max(log.cpu_s for log in logs) / seconds, _lag_of(due)),
        server=server,
    )


def _by_outcome(answers: Sequence[Answer]) -> tuple[list[Answer], dict[str, list[Answer]]]:
    """Those with detections, and the others by status."""
    by_status = defaultdict(list)
    for answer in answers:
        by_status[answer.status].append(answer)
    return by_status.pop("OK", []), by_status


def _latency_of(answers: Sequence[Answer]) -> Latency:
    return latency_from_seconds([answer.received - answer.due for answer in answers])


def _lag_of(answers: Sequence[Answer]) -> float:
    return percentile(sorted(1000 * (answer.sent - answer.due) for answer in answers), 99)


def _backend_seconds(answers: Sequence[Answer]) -> float:
    """Time of the batches that they were in, each answer with its share."""
    timings = (answer.timing for answer in answers)
    return sum(infer_us / size for _, _, infer_us, _, size in timings) / 1e6
