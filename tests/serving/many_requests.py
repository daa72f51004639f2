"""Both clients' `detect_many`, until whatever ends it."""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import pytest

from maskrcnn_trt.serving.client import AsyncDetectorClient, DetectorClient
from maskrcnn_trt.serving.errors import ClientError


class Run(NamedTuple):
    outcomes: list[Any]
    end: ClientError | None
    """What was raised, if anything was."""


Tell = Callable[[Any], None]


def _ask(tell: Tell, address: str, images: Iterable[Any], concurrency: int, **options: Any) -> None:
    with DetectorClient(address, **options) as client:
        for outcome in client.detect_many(images, concurrency=concurrency):
            tell(outcome)


async def _ask_async(
    tell: Tell, address: str, images: Iterable[Any], concurrency: int, **options: Any
) -> None:
    async with AsyncDetectorClient(address, **options) as client:
        async for outcome in client.detect_many(images, concurrency=concurrency):
            tell(outcome)


def _run_async(*arguments: Any, **options: Any) -> None:
    asyncio.run(_ask_async(*arguments, **options))


def run(
    ask: Callable[..., None],
    address: str,
    images: Iterable[Any],
    *,
    concurrency: int = 8,
    into: list[Any] | None = None,
    **options: Any,
) -> Run:
    """Ask for images, whose outcomes may be watched as they come into a list."""
    outcomes = [] if into is None else into
    try:
        ask(outcomes.append, address, images, concurrency, **options)
    except ClientError as error:
        return Run(outcomes, error)
    return Run(outcomes, None)


both_runs = pytest.mark.parametrize(
    "run", [partial(run, _ask), partial(run, _run_async)], ids=["sync", "async"]
)
"""Has a test ask for many images by either client."""
