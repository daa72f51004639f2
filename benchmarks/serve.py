"""Serving speed as clients see it, with so many requests in flight or at a rate of their own."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import NamedTuple

from ..model.spec import ShapeBucket
from ..serving.client import DetectorClient
from ..serving.client.image_requests import request_from_image
from ..serving.detections import DetectionOptions, MaskFormat
from .images import noise_jpeg
from .process_usage import usage_between
from .serve_load import Arrivals, ClosedLoop, Load, LoadPart, OpenLoop, Span, send_part
from .serve_results import ServeResult, result_from_logs
from .server_process import running_server

_NOISE_SIZE = ShapeBucket(480, 640)
NOISE = f"noise in a JPEG of {_NOISE_SIZE} pixels (height x width), as most pictures of COCO have"
"""What is sent where no images are given."""

_HEAD_START_S = 0.2
"""For processes to get what they are to send."""
_START_LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """How a server is measured."""

    concurrencies: Sequence[int] = (1, 4, 16)
    """Requests kept in flight: clients, each of which waits for its answer."""
    streamed: Sequence[int] = ()
    """Requests kept in flight over a stream of each process."""
    rates: Sequence[float] = ()
    """Images a second that come whether or not those before them are answered."""
    loads: Sequence[float] = ()
    """Such rates as shares of the highest that was reached with `concurrencies`."""
    arrivals: Arrivals = "poisson"
    """How they come."""
    images: Sequence[bytes] = ()
    """Encoded images, sent in turn; none, `NOISE`."""
    masks: MaskFormat = MaskFormat.RLE
    """Form of the masks that are asked for."""
    seconds: float = 5.0
    """Length of each measurement."""
    warmup_seconds: float = 1.0
    """Time before each during which requests are sent and not counted."""
    timeout_s: float = 30.0
    """Longest wait for an answer."""
    processes: int = 1
    """Those that send, each over a connection of its own."""
    seed: int = 0
    """Of the arrivals."""

    def encoded_images(self) -> Sequence[bytes]:
        """What is sent."""
        return self.images or [noise_jpeg(_NOISE_SIZE)]


def measure_bundle(
    bundle: Path, settings: ServeSettings, options: Sequence[str] = ()
) -> Iterator[ServeResult]:
    """Measure a server of a bundle, which is started for it, as `measure_server` does.

    Args:
        bundle: Folder that export wrote.
        settings: How to measure.
        options: Further words for `maskrcnn serve`.

    Raises:
        ServerStartError: the server did not start.
    """
    with running_server(bundle, *options) as server:
        yield from measure_server(server.address, settings, server.pid)


def measure_server(
    address: str, settings: ServeSettings, pid: int | None = None
) -> Iterator[ServeResult]:
    """Measure the server at `host:port` under one load after the other, closed loops first.

    Args:
        address: Where it is.
        settings: How to measure.
        pid: Its process, to be watched; none, it is not.

    Yields:
        A result a load, when it is there.

    Raises:
        ServingError: the server does not answer, or refuses an image though it has no other.
        NoAnswerError: under a load it answered nothing with detections.
    """
    target = _target_at(address, settings, pid)
    capacity = 0.0
    with _client_processes(settings.processes) as pool:
        for clients in settings.concurrencies:
            result = _measure(pool, target, ClosedLoop(clients), settings)
            capacity = max(capacity, result.images_per_second)
            yield result
        for clients in settings.streamed:
            yield _measure(pool, target, ClosedLoop(clients, streamed=True), settings)
        for rate in (*settings.rates, *(share * capacity for share in settings.loads)):
            yield _measure(pool, target, OpenLoop(rate, settings.arrivals), settings)


class _Target(NamedTuple):
    """What load is sent to."""

    address: str
    requests: Sequence[bytes]
    """What is sent, in turn."""
    max_batch: int
    pid: int | None


def _target_at(address: str, settings: ServeSettings, pid: int | None) -> _Target:
    """The server at an address, which has answered a request."""
    options = DetectionOptions(mask_format=settings.masks)
    images = settings.encoded_images()
    with DetectorClient(address, retries=0) as client:
        max_batch = client.model().limits.max_batch
        client.detect(images[0], options)
    requests = [request_from_image(image, options).SerializeToString() for image in images]
    return _Target(address, requests, max_batch, pid)


def _measure(
    pool: ProcessPoolExecutor, target: _Target, load: Load, settings: ServeSettings
) -> ServeResult:
    begin = time.monotonic() + _HEAD_START_S
    start = begin + settings.warmup_seconds
    span = Span(begin, start, start + settings.seconds)
    parts = [
        LoadPart(
            address=target.address,
            load=load,
            index=index,
            count=settings.processes,
            requests=target.requests,
            span=span,
            timeout_s=settings.timeout_s,
            seed=settings.seed,
        )
        for index in range(settings.processes)
    ]
    logs = pool.map(send_part, parts)
    server = None if target.pid is None else usage_between(target.pid, span.start, span.end)
    return result_from_logs(list(logs), load, span, target.max_batch, server)


@contextmanager
def _client_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """So many processes, each of which is up, and free for one piece of work."""
    context = get_context("spawn")
    with ProcessPoolExecutor(count, context, _meet, (context.Barrier(count),)) as pool:
        list(pool.map(abs, range(count)))
        yield pool


def _meet(others: Barrier) -> None:
    others.wait(_START_LIMIT_S)
