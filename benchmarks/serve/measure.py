"""Measurement of a server under load by client processes, in closed loops and open loops."""

import re
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import NamedTuple

from ...model.bundle.spec import ShapeBucket
from ...model.child_process import module_command
from ...serving.client import Credentials, DetectorClient
from ...serving.client.connection import NO_CREDENTIALS
from ...serving.client.image_requests import request_from_image
from ...serving.config import address_of
from ...serving.detections import DetectionOptions, MaskFormat
from ..common.images import noise_jpeg
from ..common.processes import ProcessError, measure_process_usage
from .load import (
    Arrivals,
    ClientLoad,
    ClosedLoop,
    HttpLoop,
    Load,
    LoadWindow,
    OpenLoop,
    send_load,
)
from .results import ServeResult, result_from_logs

_LOCALHOST = "127.0.0.1"
_NOISE_SIZE = ShapeBucket(480, 640)
NOISE = f"noise in a JPEG of {_NOISE_SIZE} pixels (height x width), a frequent size in COCO"

# Time between submitting a load to the client processes and sending its first request.
_HEAD_START_S = 0.2
# Maximum time for all client processes to start.
_START_LIMIT_S = 120.0


class ServerStartError(Exception):
    """The server process ended before it was ready. Its error message is on stderr."""


class ServerProcess(NamedTuple):
    """Address and process ID of a server that is ready for requests."""

    # `host:port`.
    address: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Settings of the serving benchmark: loads, images to send, and durations."""

    # Number of clients of each closed loop with unary calls. A client has one request in flight.
    concurrencies: Sequence[int] = (1, 4, 16)
    # Number of clients of each closed loop over one stream per client process.
    streamed: Sequence[int] = ()
    # Number of clients of each closed loop over HTTP.
    http: Sequence[int] = ()
    # Images per second of each open loop.
    rates: Sequence[float] = ()
    # Rates of further open loops, as fractions of the highest throughput with unary calls.
    loads: Sequence[float] = ()
    # Arrival process of open loops.
    arrivals: Arrivals = "poisson"
    # Encoded images, sent in rotation. Empty: send the image that `NOISE` describes.
    images: Sequence[bytes] = ()
    # Requested format of the masks.
    masks: MaskFormat = MaskFormat.RLE
    # Duration of each measurement.
    seconds: float = 5.0
    # Time before each measurement in which requests are sent but not counted.
    warmup_seconds: float = 1.0
    # Deadline of a request in seconds.
    timeout_s: float = 30.0
    # Credentials of the clients that use gRPC. HTTP clients have none.
    credentials: Credentials = NO_CREDENTIALS
    # Number of client processes. Each has its own gRPC connection.
    processes: int = 1
    # Seed of the arrival times.
    seed: int = 0

    def grpc_clients(self) -> Sequence[int]:
        """Return the numbers of clients to measure with unary gRPC calls, in ascending order.

        They include the numbers of HTTP clients, so that HTTP can be compared with gRPC.
        """
        return sorted({*self.concurrencies, *self.http})

    def encoded_images(self) -> Sequence[bytes]:
        """Return the encoded images to send: `images` or, if it is empty, one image of noise."""
        return self.images or [noise_jpeg(_NOISE_SIZE)]


@contextmanager
def running_server(bundle: Path, *options: str) -> Iterator[ServerProcess]:
    """Serve a bundle on a free port, in a new process, until the `with` block ends.

    Args:
        bundle: Folder of the bundle.
        options: Further arguments of `maskrcnn serve`.

    Yields:
        The server, when it is ready for requests.

    Raises:
        ServerStartError: the server ended before it was ready.
    """
    command = [*module_command("maskrcnn_trt"), "serve", str(bundle), "--port", "0"]
    # Switch off the access log, which would hide the results on the terminal.
    command += ["--log-level", "warning", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            ready = re.search(r"\S+:\d+", process.stdout.readline())
            if ready is None:
                raise ServerStartError(
                    f"the server of {bundle} ended before it was ready; the output above has the "
                    "reason"
                )
            yield ServerProcess(ready[0], process.pid)
        finally:
            process.terminate()


def measure_bundle(
    bundle: Path, settings: ServeSettings, options: Sequence[str] = ()
) -> Iterator[ServeResult]:
    """Start a server for a bundle, measure it under each load, and stop it.

    Args:
        bundle: Folder of the bundle.
        settings: Loads, images and durations.
        options: Further arguments of `maskrcnn serve`.

    Yields:
        The result of each load when it is complete.

    Raises:
        ServerStartError: the server did not start.
        ServingError: the server rejects the first image, which is sent as a check.
        NoAnswerError: under one of the loads, no request succeeded.
        ProcessError: the server or a client process ended during a measurement.
    """
    http_address = None
    if settings.http:
        with socket.create_server((_LOCALHOST, 0)) as free:
            port = free.getsockname()[1]
        http_address = address_of(_LOCALHOST, port)
        options = (*options, "--http-port", str(port))
    with running_server(bundle, *options) as server:
        yield from measure_server(server.address, settings, server.pid, http_address)


def measure_server(
    address: str, settings: ServeSettings, pid: int | None = None, http_address: str | None = None
) -> Iterator[ServeResult]:
    """Measure a running server under each load of `settings`, closed loops first.

    Args:
        address: gRPC address of the server, `host:port`.
        settings: Loads, images and durations.
        pid: Process ID of the server, to measure its resource use. None: do not measure it.
        http_address: Address of the server's HTTP port, for `settings.http`. None: measure no loads
            over HTTP.

    Yields:
        The result of each load when it is complete.

    Raises:
        ServingError: the server does not respond, or rejects the first image, which is sent as a
            check.
        NoAnswerError: under one of the loads, no request succeeded.
        ProcessError: the server or a client process ended during a measurement.
    """
    target = _target_at(address, settings, pid)
    capacity = 0.0
    with _client_processes(settings.processes) as pool:
        for clients in settings.grpc_clients():
            result = _measure(pool, target, ClosedLoop(clients), settings)
            capacity = max(capacity, result.images_per_second)
            yield result
            if http_address is not None and clients in settings.http:
                images = settings.encoded_images()
                over_http = target._replace(address=http_address, requests=images)
                path = f"/v1/detect?mask_format={settings.masks.value}"
                yield _measure(pool, over_http, HttpLoop(clients, path=path), settings)
        for clients in settings.streamed:
            yield _measure(pool, target, ClosedLoop(clients, streamed=True), settings)
        for rate in (*settings.rates, *(share * capacity for share in settings.loads)):
            yield _measure(pool, target, OpenLoop(rate, settings.arrivals), settings)


class _ServerTarget(NamedTuple):
    address: str
    # Messages to send in rotation: serialized DetectRequests or, for HTTP, encoded images.
    requests: Sequence[bytes]
    max_batch: int
    pid: int | None


def _target_at(address: str, settings: ServeSettings, pid: int | None) -> _ServerTarget:
    """Return the target of a measurement, after a check that the server can process an image.

    The target has the server's address, maximum batch size and process ID, and one serialised
    request per image of the settings.
    """
    options = DetectionOptions(mask_format=settings.masks)
    images = settings.encoded_images()
    with DetectorClient(address, retries=0, credentials=settings.credentials) as client:
        max_batch = client.model().limits.max_batch
        client.detect(images[0], options)
    requests = [request_from_image(image, options).SerializeToString() for image in images]
    return _ServerTarget(address, requests, max_batch, pid)


def _measure(
    pool: ProcessPoolExecutor, target: _ServerTarget, load: Load, settings: ServeSettings
) -> ServeResult:
    begin = time.monotonic() + _HEAD_START_S
    start = begin + settings.warmup_seconds
    window = LoadWindow(begin, start, start + settings.seconds)
    shares = [
        ClientLoad(
            address=target.address,
            load=load,
            index=index,
            count=settings.processes,
            requests=target.requests,
            window=window,
            timeout_s=settings.timeout_s,
            seed=settings.seed,
            credentials=settings.credentials,
        )
        for index in range(settings.processes)
    ]
    logs = pool.map(send_load, shares)
    server = None
    if target.pid is not None:
        server = measure_process_usage(target.pid, window.start, window.end)
    return result_from_logs(list(logs), load, window, target.max_batch, server)


@contextmanager
def _client_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Start `count` client processes, and yield their pool when all of them run.

    Raises:
        ProcessError: a client process died.
    """
    context = get_context("spawn")
    try:
        with ProcessPoolExecutor(count, context, _await_all, (context.Barrier(count),)) as pool:
            list(pool.map(abs, range(count)))
            yield pool
    except BrokenProcessPool:
        raise ProcessError(
            "a client process died, probably because memory ran out; free memory, or lower "
            "--processes or --concurrency"
        ) from None


def _await_all(barrier: Barrier) -> None:
    # To unpickle this function, each process imports this module, which takes seconds. This import
    # is therefore complete before the first measurement.
    barrier.wait(_START_LIMIT_S)
