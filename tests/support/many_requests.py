"""Runs of `detect_many` with the sync and the async client, until they end or raise."""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from maskrcnn_trt.serving.client import AsyncDetectorClient, DetectorClient
from maskrcnn_trt.serving.errors import ClientError

# Values that are not several images.
NO_LISTS = ["a.jpg", b"content", Path("a.jpg"), np.zeros((8, 8, 3), np.uint8), None]


def kind_of(value: object) -> str:
    return type(value).__name__


class Run(NamedTuple):
    outcomes: list[Any]
    # The error that ended the run. None: it ended with the last image.
    error: ClientError | None


Report = Callable[[Any], None]


def _detect_many(
    report: Report, address: str, images: Iterable[Any], concurrency: int, **options: Any
) -> None:
    with DetectorClient(address, **options) as client:
        for outcome in client.detect_many(images, concurrency=concurrency):
            report(outcome)


def _detect_many_async(
    report: Report, address: str, images: Iterable[Any], concurrency: int, **options: Any
) -> None:
    async def run() -> None:
        async with AsyncDetectorClient(address, **options) as client:
            async for outcome in client.detect_many(images, concurrency=concurrency):
                report(outcome)

    asyncio.run(run())


def _run(
    detect_many: Callable[..., None],
    address: str,
    images: Iterable[Any],
    *,
    concurrency: int = 8,
    into: list[Any] | None = None,
    **options: Any,
) -> Run:
    """Run `detect_many` on images. Return the outcomes, and the error that ended the run or None.

    If `into` is a list, each outcome is appended to it when it arrives.
    """
    outcomes = [] if into is None else into
    try:
        detect_many(outcomes.append, address, images, concurrency, **options)
    except ClientError as error:
        return Run(outcomes, error)
    return Run(outcomes, None)


# Decorator that runs a test with the sync and with the async client, as its argument `run`.
both_runs = pytest.mark.parametrize(
    "run", [partial(_run, _detect_many), partial(_run, _detect_many_async)], ids=["sync", "async"]
)
