"""Load on a server: requests at their times, and what became of each."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import grpc
import numpy as np

from ..protos.maskrcnn.v1 import detector_pb2 as pb
from ..serving.client.connection import channel_options

Arrivals = Literal["poisson", "constant"]

_SERVICE = "/maskrcnn.v1.Detector"
_STATUS_NAMES = {status.value[0]: status.name for status in grpc.StatusCode}
_PAUSE_S = 0.1
"""Before a client of a closed loop that was refused sends again, as ours does."""


@dataclass(frozen=True)
class ClosedLoop:
    """Clients, each of which sends its next image when it has the answer to the last."""

    clients: int
    streamed: bool = False
    """Whether those of a process send over one stream, rather than make a call for each image."""


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


class _Outcome(NamedTuple):
    status: str
    timing: tuple[int, ...] = ()


_Send = Callable[[float], Awaitable[str]]
_Ask = Callable[[bytes], Awaitable[_Outcome]]


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
    # Not the client of the package: less work of its own leaves more to the server.
    async with grpc.aio.insecure_channel(part.address, channel_options(retries=0)) as channel:
        streamed = isinstance(part.load, ClosedLoop) and part.load.streamed
        ask = (_asking_by_stream if streamed else _asking_by_call)(channel, part)

        async def send(due: float) -> str:
            sent = time.monotonic()
            status, timing = await ask(next(turns))
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


def _asking_by_call(channel: grpc.aio.Channel, part: LoadPart) -> _Ask:
    detect = channel.unary_unary(f"{_SERVICE}/Detect", None, pb.DetectResponse.FromString)

    async def ask(request: bytes) -> _Outcome:
        try:
            return _outcome_of(await detect(request, timeout=part.timeout_s))
        except grpc.aio.AioRpcError as error:
            return _Outcome(error.code().name)

    return ask


def _asking_by_stream(channel: grpc.aio.Channel, part: LoadPart) -> _Ask:
    """Over one stream, on which answers come in any order; once it breaks, so do all requests."""
    detect: Any = channel.stream_stream(
        f"{_SERVICE}/DetectStream", None, pb.DetectStreamResponse.FromString
    )
    call = detect(timeout=part.span.end - time.monotonic() + part.timeout_s)
    waiting: dict[str, asyncio.Future[_Outcome]] = {}
    names = map(str, itertools.count())
    writing = asyncio.Lock()  # gRPC takes one message at a time

    async def read() -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for answer in call:
                waiting.pop(answer.id).set_result(_outcome_of_answer(answer))
        broken = _Outcome((await call.code()).name)
        for outcome in waiting.values():
            outcome.set_result(broken)

    reading = asyncio.create_task(read())

    async def ask(request: bytes) -> _Outcome:
        if reading.done():
            return _Outcome((await call.code()).name)
        name = next(names)
        outcome: asyncio.Future[_Outcome] = asyncio.get_running_loop().create_future()
        waiting[name] = outcome
        # The encodings of two messages, joined, are that of a message with the fields of both.
        named = request + pb.DetectRequest(id=name).SerializeToString()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async with writing:
                await call.write(named)
        return await outcome

    return ask


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


def _outcome_of(response: pb.DetectResponse) -> _Outcome:
    t = response.timing
    return _Outcome("OK", (t.decode_us, t.queue_us, t.infer_us, t.encode_us, t.batch_size))


def _outcome_of_answer(answer: pb.DetectStreamResponse) -> _Outcome:
    if answer.HasField("error"):
        return _Outcome(_STATUS_NAMES[answer.error.code])
    return _outcome_of(answer.response)
