"""Images of invalid types and shapes."""

import asyncio
import io
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from many_requests import Run, both_runs
from stub_server import StubDetector, stub_server

from maskrcnn_trt.serving.client import AsyncDetectorClient, DetectorClient
from maskrcnn_trt.serving.detections import Detections
from maskrcnn_trt.serving.errors import RefusedError

ALLOWED = r"bytes of a file, a pathlib\.Path or a uint8 array \[H, W, 3\]"

invalid_types = pytest.mark.parametrize(
    ("image", "kind"),
    [
        ("street.jpg", "str"),
        (bytearray(b"x"), "bytearray"),
        (memoryview(b"x"), "memoryview"),
        (None, "NoneType"),
        (io.BytesIO(b"x"), "BytesIO"),
        ([[[0, 0, 0]]], "list"),
        (np.zeros((8, 8, 3), np.float32), "array of float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
invalid_shapes = pytest.mark.parametrize(
    "shape", [(3, 8, 9), (0, 8, 3), (8, 0, 3), (8, 9), (8, 9, 4), (1, 8, 9, 3), ()], ids=str
)


@invalid_types
@both_runs
def test_invalid_type_ends_a_run(run: Callable[..., Run], image: Any, kind: str) -> None:
    outcomes: list[Any] = []
    with stub_server(StubDetector()) as address, pytest.raises(TypeError, match=ALLOWED) as caught:
        run(address, [b"a", b"bb", image, b"never sent"], concurrency=2, into=outcomes)
    assert f"not {kind}" in str(caught.value)
    assert ("wrap a path in Path" in str(caught.value)) == isinstance(image, str)
    assert [outcome.height for outcome in outcomes] == [1, 2]


def test_invalid_type_is_rejected_by_detect_and_stream() -> None:
    invalid: Any = "street.jpg"
    images = [b"a", invalid, b"never sent"]
    results: list[Any] = []

    async def stream(client: AsyncDetectorClient) -> None:
        async for outcome in client.stream(images):
            results.append(outcome)  # noqa: PERF401  # to keep those before the error

    async def detect(address: str) -> None:
        async with AsyncDetectorClient(address) as client:
            with pytest.raises(TypeError, match=ALLOWED):
                await client.detect(invalid)
            with pytest.raises(TypeError, match=ALLOWED):
                await stream(client)

    with stub_server(StubDetector()) as address:
        with DetectorClient(address) as client:
            with pytest.raises(TypeError, match=ALLOWED):
                client.detect(invalid)
            with pytest.raises(TypeError, match=ALLOWED):
                results.extend(client.stream(images))
        asyncio.run(detect(address))
    assert [(index, outcome.height) for index, outcome in results] == [(0, 1)] * 2


@invalid_shapes
@both_runs
def test_invalid_shape_does_not_affect_the_others(
    run: Callable[..., Run], shape: tuple[int, ...]
) -> None:
    with stub_server(StubDetector()) as address:
        result = run(address, [b"a", np.zeros(shape, np.uint8), b"ccc"], concurrency=1)
    assert result.error is None
    first, refused, last = result.outcomes
    assert (first.height, last.height) == (1, 3)
    assert isinstance(refused, RefusedError)
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert str(list(shape)) in str(refused)
    assert "[H, W, 3]" in str(refused)


@both_runs
def test_array_may_have_any_memory_layout(run: Callable[..., Run]) -> None:
    pixels = np.zeros((3, 8, 9), np.uint8).transpose(1, 2, 0)
    with stub_server(StubDetector()) as address:
        (outcome,) = run(address, [pixels]).outcomes
    assert isinstance(outcome, Detections)
