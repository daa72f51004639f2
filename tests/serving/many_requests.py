"""Both clients' `detect_many`, until whatever ends it."""

import asyncio
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest

from maskrcnn_trt.serving.client import AsyncDetectorClient, DetectorClient
from maskrcnn_trt.serving.errors import ClientError


class Run(NamedTuple):
    outcomes: list[Any]
    end: ClientError | None
    """What was raised, if anything was."""


def run(
    address: str,
    images: Iterable[Any],
    *,
    concurrency: int = 8,
    into: list[Any] | None = None,
    **options: Any,
) -> Run:
    """Ask for images, whose outcomes may be watched as they come into a list."""
    outcomes = [] if into is None else into
    with DetectorClient(address, **options) as client:
        try:
            outcomes.extend(client.detect_many(images, concurrency=concurrency))
        except ClientError as error:
            return Run(outcomes, error)
    return Run(outcomes, None)


def run_async(
    address: str,
    images: Iterable[Any],
    *,
    concurrency: int = 8,
    into: list[Any] | None = None,
    **options: Any,
) -> Run:
    outcomes = [] if into is None else into

    async def ask() -> None:
        async with AsyncDetectorClient(address, **options) as client:
            async for outcome in client.detect_many(images, concurrency=concurrency):
                outcomes.append(outcome)

    try:
        asyncio.run(ask())
    except ClientError as error:
        return Run(outcomes, error)
    return Run(outcomes, None)


both_runs = pytest.mark.parametrize("run", [run, run_async])
"""Has a test ask for many images by either client."""
