"""Load generator: client processes that send requests in closed or open loops and log outcomes."""

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import grpc
import numpy as np

from ...protos.maskrcnn.v1 import detector_pb2 as pb
from ...serving.client.connection import NO_CREDENTIALS, Credentials, channel_options
from .http_client import HttpClient

Arrivals = Literal["poisson", "constant"]

_SERVICE = "/maskrcnn.v1.Detector"
# Fields of a response's timing, in the order of `RequestLog.timing`.
_TIMING = ("decode_us", "queue_us", "infer_us", "encode_us", "batch_size")
_STATUS_NAMES = {status.value[0]: status.name for status in grpc.StatusCode}
# Pause in seconds of a closed-loop client after a failed request. It equals the pause of this
# project's gRPC client before its first retry.
_PAUSE_S = 0.1


@dataclass(frozen=True)
class ClosedLoop:
    """Load by clients that each send their next image after the response to the previous one."""

    clients: int
    # True: all clients of a process share one stream. False: a unary call per image.
    streamed: bool = False


@dataclass(frozen=True)
class HttpLoop(ClosedLoop):
    """Load over HTTP by clients that each send an image after the response to the previous one.

    Each client has a separate connection.
    """

    path: str = "/v1/detect"


@dataclass(frozen=True)
class OpenLoop:
    """Load of images sent at a given rate, whether or not earlier responses have arrived."""

    # Images per second.
    rate: float
    # Sending times: random times of a Poisson process, or equal intervals.
    arrivals: Arrivals = "poisson"


Load = ClosedLoop | OpenLoop


class LoadWindow(NamedTuple):
    """Times of the first request, of the end of the warm-up, and of the end of a measurement.

    Times are seconds of `time.monotonic`, a clock that all processes of a machine share.
    """

    # Time of the first request.
    begin: float
    # End of the warm-up. Requests due from this time on are counted.
    start: float
    # Time after which no request is sent. Requests in flight are still awaited.
    end: float


@dataclass(frozen=True, kw_only=True)
class ClientLoad:
    """Share of a load that one client process sends: server, requests, time window and seed."""

    address: str
    load: Load
    # Index of the process, 0 to `count - 1`.
    index: int
    # Number of client processes.
    count: int
    # Messages to send in rotation: serialized DetectRequests or, for an HttpLoop, encoded images.
    requests: Sequence[bytes]
    window: LoadWindow
    # Deadline of a request in seconds.
    timeout_s: float
    # Seed of the arrival times.
    seed: int
    # Credentials for gRPC. An HttpLoop ignores them.
    credentials: Credentials = NO_CREDENTIALS


class RequestLog(NamedTuple):
    """Times and status of one request. Times are seconds of `time.monotonic`."""

    # Time at which the request should be sent. Latency is measured from this time, so that it
    # includes the delay if the client sends the request later.
    due: float
    sent: float
    received: float
    # Name of the gRPC status, or `HTTP` and the status code.
    status: str
    # Microseconds of decoding, queueing, inference and encoding, and the size of the batch. Empty
    # unless the status is `OK`.
    timing: tuple[int, ...]


class ClientLog(NamedTuple):
    """Request outcomes and CPU time of one client process."""

    # All requests, including those of the warm-up.
    requests: list[RequestLog]
    # CPU time of the process between start and end of the window.
    cpu_s: float


class _Outcome(NamedTuple):
    status: str
    timing: tuple[int, ...] = ()


_SendAt = Callable[[float], Awaitable[str]]
_Detect = Callable[[bytes], Awaitable[_Outcome]]


def send_load(load: ClientLoad) -> ClientLog:
    """Send one client process's share of a load, wait for all responses, and return the log.

    A client process simulates several clients. Over gRPC, they share one connection. Over HTTP (a
    load of type `HttpLoop`), each client has a separate connection.
    """
    return asyncio.run(_send_load(load))


def arrival_times(load: OpenLoop, share: ClientLoad) -> list[float]:
    """Return the times at which one client process sends images, in seconds of `time.monotonic`.

    Args:
        load: total rate of all client processes, and whether times are random or equally spaced.
        share: settings of the client process: its index, number of processes, time window and seed.
    """
    window = share.window
    if load.arrivals == "constant":
        total = int(load.rate * (window.end - window.begin))
        return [window.begin + i / load.rate for i in range(share.index, total, share.count)]
    random = np.random.default_rng((share.seed, share.index))
    times: list[float] = []
    now = window.begin
    while (now := now + random.exponential(share.count / load.rate)) < window.end:
        times.append(now)
    return times


async def _send_load(share: ClientLoad) -> ClientLog:
    images = itertools.cycle(share.requests)
    logs: list[RequestLog] = []
    async with _detecting(share) as detect:

        async def send(due: float) -> str:
            sent = time.monotonic()
            status, timing = await detect(next(images))
            logs.append(RequestLog(due, sent, time.monotonic(), status, timing))
            return status

        async with asyncio.TaskGroup() as group:
            cpu_s = group.create_task(_cpu_seconds(share.window))
            if isinstance(share.load, ClosedLoop):
                for _ in range(share.index, share.load.clients, share.count):
                    group.create_task(_run_client(send, share.window))
            else:
                for due in arrival_times(share.load, share):
                    await _sleep_until(due)
                    group.create_task(send(due))
    return ClientLog(logs, cpu_s.result())


@contextlib.asynccontextmanager
async def _detecting(share: ClientLoad) -> AsyncIterator[_Detect]:
    """Context manager: yield a function that sends one request, and returns its status and timing.

    The function takes the request as bytes. The connections of the client process are open until
    the `with` block ends.
    """
    if isinstance(share.load, HttpLoop):
        with contextlib.closing(HttpClient(share.address)) as client:
            yield _http_detect(client, share.load.path, share.timeout_s)
        return
    # A bare channel instead of the package's client leaves more CPU time to the server.
    options = channel_options(retries=0)
    async with share.credentials.open_channel(grpc.aio, share.address, options) as channel:
        streamed = isinstance(share.load, ClosedLoop) and share.load.streamed
        yield (_stream_detect if streamed else _unary_detect)(channel, share)


def _http_detect(client: HttpClient, path: str, timeout_s: float) -> _Detect:
    async def detect(image: bytes) -> _Outcome:
        try:
            async with asyncio.timeout(timeout_s):
                response = await client.post(path, image)
        except TimeoutError:
            return _Outcome(grpc.StatusCode.DEADLINE_EXCEEDED.name)
        except (OSError, EOFError):
            return _Outcome(grpc.StatusCode.UNAVAILABLE.name)
        if response.status != 200:
            return _Outcome(f"HTTP {response.status}")
        timing = json.loads(response.body)["timing"]
        return _Outcome("OK", tuple(timing[name] for name in _TIMING))

    return detect


def _unary_detect(channel: grpc.aio.Channel, share: ClientLoad) -> _Detect:
    """Return a function that sends one request as a unary gRPC call."""
    call = channel.unary_unary(f"{_SERVICE}/Detect", None, pb.DetectResponse.FromString)
    metadata = share.credentials.metadata

    async def detect(request: bytes) -> _Outcome:
        try:
            return _outcome_of(await call(request, timeout=share.timeout_s, metadata=metadata))
        except grpc.aio.AioRpcError as error:
            return _Outcome(error.code().name)

    return detect


def _stream_detect(channel: grpc.aio.Channel, share: ClientLoad) -> _Detect:
    """Return a function that sends one request over a gRPC stream. All requests share the stream.

    Responses arrive in any order. If the stream breaks, all requests in flight end with the
    stream's status.
    """
    open_stream: Any = channel.stream_stream(
        f"{_SERVICE}/DetectStream", None, pb.DetectStreamResponse.FromString
    )
    timeout_s = share.window.end - time.monotonic() + share.timeout_s
    stream = open_stream(timeout=timeout_s, metadata=share.credentials.metadata)
    in_flight: dict[str, asyncio.Future[_Outcome]] = {}
    ids = map(str, itertools.count())
    write_lock = asyncio.Lock()  # gRPC allows one write at a time

    async def read_responses() -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for response in stream:
                in_flight.pop(response.id).set_result(_stream_outcome_of(response))
        broken = _Outcome((await stream.code()).name)
        for outcome in in_flight.values():
            outcome.set_result(broken)

    reader = asyncio.create_task(read_responses())

    async def detect(request: bytes) -> _Outcome:
        if reader.done():
            return _Outcome((await stream.code()).name)
        request_id = next(ids)
        outcome: asyncio.Future[_Outcome] = asyncio.get_running_loop().create_future()
        in_flight[request_id] = outcome
        # Append the ID in serialized form: two concatenated messages are one message with the
        # fields of both, and the image need not be serialized again.
        message = request + pb.DetectRequest(id=request_id).SerializeToString()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async with write_lock:
                await stream.write(message)
        return await outcome

    return detect


async def _run_client(send: _SendAt, window: LoadWindow) -> None:
    await _sleep_until(window.begin)
    while (now := time.monotonic()) < window.end:
        if await send(now) != "OK":
            await asyncio.sleep(_PAUSE_S)


async def _cpu_seconds(window: LoadWindow) -> float:
    await _sleep_until(window.start)
    before = time.process_time()
    await _sleep_until(window.end)
    return time.process_time() - before


async def _sleep_until(moment: float) -> None:
    delay = moment - time.monotonic()
    if delay > 0:
        await asyncio.sleep(delay)


def _outcome_of(response: pb.DetectResponse) -> _Outcome:
    return _Outcome("OK", tuple(getattr(response.timing, name) for name in _TIMING))


def _stream_outcome_of(response: pb.DetectStreamResponse) -> _Outcome:
    if response.HasField("error"):
        return _Outcome(_STATUS_NAMES[response.error.code])
    return _outcome_of(response.response)
