"""Serving speed as clients see it: a closed loop over the real client."""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..model.spec import ShapeBucket
from ..serving.client import AsyncDetectorClient
from ..serving.detections import Timing
from .images import noise_jpeg
from .latency import Latency, latency_from_seconds
from .server_process import running_server

NOISE_SIZE = ShapeBucket(480, 640)
"""Size of the picture that is sent where none is given: that of most in COCO."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """How a server is measured."""

    concurrencies: Sequence[int] = (1, 4, 16)
    """Requests kept in flight."""
    images: Sequence[bytes] = ()
    """Encoded images, sent in turn; none, noise of `NOISE_SIZE`."""
    seconds: float = 5.0
    """Length of each measurement."""
    warmup_seconds: float = 1.0
    """Time before each during which requests are sent and not counted."""


@dataclass(frozen=True)
class StageTimes:
    """Mean milliseconds of a request in each stage of the server, as it reports them."""

    decode: float
    queue: float
    infer: float
    encode: float


@dataclass(frozen=True)
class ServeResult:
    """One server at one concurrency."""

    concurrency: int
    """Clients, each of which sends its next image when it has the answer to the last."""
    requests: int
    images_per_second: float
    latency: Latency
    """Of a request, from the client's call to its result."""
    mean_batch_size: float
    """Size of the batch that a request was in, mean over requests."""
    stages: StageTimes


class NoAnswerError(Exception):
    """Nothing was answered while it was measured."""


@dataclass(frozen=True)
class _Answer:
    sent: float
    received: float
    timing: Timing


def measure_bundle(bundle: Path, settings: ServeSettings) -> list[ServeResult]:
    """Measure a server of a bundle, which is started for it; raises as `measure_server`.

    Raises:
        ServerStartError: the server did not start.
    """
    with running_server(bundle) as address:
        return measure_server(address, settings)


def measure_server(address: str, settings: ServeSettings) -> list[ServeResult]:
    """Measure the server at `host:port`, one concurrency after the other.

    Raises:
        ServingError: a request failed, which ends the measurement.
        NoAnswerError: the time was too short for a single answer.
    """
    return [
        asyncio.run(_measure(address, concurrency, settings))
        for concurrency in settings.concurrencies
    ]


async def _measure(address: str, concurrency: int, settings: ServeSettings) -> ServeResult:
    turns = itertools.cycle(settings.images or [noise_jpeg(NOISE_SIZE)])
    start = time.perf_counter() + settings.warmup_seconds
    end = start + settings.seconds
    async with AsyncDetectorClient(address) as client:
        try:
            async with asyncio.TaskGroup() as group:
                clients = [
                    group.create_task(_send_until(end, client, turns)) for _ in range(concurrency)
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
    answers = [answer for task in clients for answer in task.result()]
    counted = [answer for answer in answers if start <= answer.received <= end]
    if not counted:
        raise NoAnswerError(
            f"no request was answered within {settings.seconds:g} s; measure longer with --seconds"
        )
    return _result_from(counted, concurrency, settings.seconds)


async def _send_until(
    end: float, client: AsyncDetectorClient, turns: Iterator[bytes]
) -> list[_Answer]:
    answers = []
    while (sent := time.perf_counter()) < end:
        detections = await client.detect(next(turns))
        assert detections.timing is not None  # servers always give it
        answers.append(_Answer(sent, time.perf_counter(), detections.timing))
    return answers


def _result_from(answers: Sequence[_Answer], concurrency: int, seconds: float) -> ServeResult:
    timings = [answer.timing for answer in answers]
    means = np.mean(
        [(t.decode_us, t.queue_us, t.infer_us, t.encode_us, t.batch_size) for t in timings], axis=0
    ).tolist()
    return ServeResult(
        concurrency=concurrency,
        requests=len(answers),
        images_per_second=len(answers) / seconds,
        latency=latency_from_seconds([answer.received - answer.sent for answer in answers]),
        mean_batch_size=means[4],
        stages=StageTimes(*(us / 1000 for us in means[:4])),
    )
