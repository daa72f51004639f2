"""Load on a server: requests at their times, and what became of each."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import grpc
import numpy as np

from ..protos.maskrcnn.v1 import detector_pb2 as pb
from ..serving.connection import channel_options

Arrivals = Literal["poisson", "constant"]

_METHOD = "/maskrcnn.v1.Detector/Detect"
_PAUSE_S = 0.1
"""Before a client of a closed loop that was refused sends again, as ours does."""


@dataclass(frozen=True)
class ClosedLoop:
    """Clients, each of which sends its next image when it has the answer to the last."""

    clients: int


@dataclass(frozen=True)
class OpenLoop:
    """Images that come at their times, whatever becomes of those before."""

    rate: float
    """Images a second."""
    arrivals: Arrivals = "poisson"
    """Whether they come at random, independent of each other, or at equal distances."""


Load = ClosedLoop | OpenLoop


class Span(NamedTuple):
    """When load is sent, on the monotonic clock, which all processes of a machine share."""

    begin: float
    start: float
    """What is due from here on is counted."""
    end: float
    """Nothing is due from here on; what was sent is waited for."""


@dataclass(frozen=True, kw_only=True)
class LoadPart:
    """The part of a load that one process sends."""

    address: str
    load: Load
    index: int
    """Of the part, 0 to `count - 1`."""
    count: int
    """Parts."""
    requests: Sequence[bytes]
    """DetectRequests in their encoding, sent in turn."""
    span: Span
    timeout_s: float
    """Longest wait for an answer."""
    seed: int


class Answer(NamedTuple):
    """What became of a request; times are those of the monotonic clock."""

    due: float
    """When it was to be sent: latency counts from here, however busy the client is."""
    sent: float
    received: float
    status: str
    """Name of a gRPC status."""
    timing: tuple[int, ...]
    """Microseconds of decoding, queue, model and encoding, and the size of the batch."""


class PartLog(NamedTuple):
    """What one process saw."""

    answers: list[Answer]
    """To all its requests, those before the start included."""
    cpu_s: float
    """That the process took between start and end."""


_Send = Callable[[float], Awaitable[str]]


def send_part(part: LoadPart) -> PartLog:
    """Send a part of a load over a connection of its own, and wait for the answers."""
    return asyncio.run(_send_part(part))


def arrival_times(load: OpenLoop, part: LoadPart) -> list[float]:
    """When the images of a part come."""
    span = part.span
    if load.arrivals == "constant":
        total = int(load.rate * (span.end - span.begin))
        return [span.begin + place / load.rate for place in range(part.index, total, part.count)]
    gaps = np.random.default_rng((part.seed, part.index))
    times: list[float] = []
    now = span.begin
    while (now := now + gaps.exponential(part.count / load.rate)) < span.end:
        times.append(now)
    return times


async def _send_part(part: LoadPart) -> PartLog:
    turns = itertools.cycle(part.requests)
    answers: list[Answer] = []
    async with grpc.aio.insecure_channel(part.address, channel_options(retries=0)) as channel:
        # Not the client of the package: less work of its own leaves more to the server.
        detect = channel.unary_unary(_METHOD, None, pb.DetectResponse.FromString)

        async def send(due: float) -> str:
            sent = time.monotonic()
            timing: tuple[int, ...] = ()
            try:
                response = await detect(next(turns), timeout=part.timeout_s)
            except grpc.aio.AioRpcError as error:
                status = error.code().name
            else:
                status, timing = "OK", _timing_of(response)
            answers.append(Answer(due, sent, time.monotonic(), status, timing))
            return status

        async with asyncio.TaskGroup() as group:
            cpu_s = group.create_task(_cpu_seconds(part.span))
            if isinstance(part.load, ClosedLoop):
                for _ in range(part.index, part.load.clients, part.count):
                    group.create_task(_send_in_turn(send, part.span))
            else:
                for due in arrival_times(part.load, part):
                    await _until(due)
                    group.create_task(send(due))
    return PartLog(answers, cpu_s.result())


async def _send_in_turn(send: _Send, span: Span) -> None:
    await _until(span.begin)
    while (now := time.monotonic()) < span.end:
        if await send(now) != "OK":
            await asyncio.sleep(_PAUSE_S)


async def _cpu_seconds(span: Span) -> float:
    await _until(span.start)
    before = time.process_time()
    await _until(span.end)
    return time.process_time() - before


async def _until(moment: float) -> None:
    delay = moment - time.monotonic()
    if delay > 0:
        await asyncio.sleep(delay)


def _timing_of(response: pb.DetectResponse) -> tuple[int, ...]:
    t = response.timing
    return t.decode_us, t.queue_us, t.infer_us, t.encode_us, t.batch_size
