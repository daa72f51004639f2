"""Clients that are given what is no image."""

import asyncio
import io
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from many_requests import Run, both_runs
from stub_server import Detector, serving

from maskrcnn_trt.serving.client import AsyncDetectorClient, DetectorClient
from maskrcnn_trt.serving.detections import Detections
from maskrcnn_trt.serving.errors import RefusedError

ALLOWED = r"bytes of a file, a pathlib\.Path or a uint8 array \[H, W, 3\]"

no_images = pytest.mark.parametrize(
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
no_pictures = pytest.mark.parametrize(
    "shape", [(3, 8, 9), (0, 8, 3), (8, 0, 3), (8, 9), (8, 9, 4), (1, 8, 9, 3), ()], ids=str
)


@no_images
@both_runs
def test_what_has_not_the_type_of_an_image_ends_a_run(
    run: Callable[..., Run], image: Any, kind: str
) -> None:
    outcomes: list[Any] = []
    with serving(Detector()) as address, pytest.raises(TypeError, match=ALLOWED) as caught:
        run(address, [b"a", b"bb", image, b"never told"], concurrency=2, into=outcomes)
    assert f"not {kind}" in str(caught.value)
    assert ("wrap a path in Path" in str(caught.value)) == isinstance(image, str)
    assert [outcome.height for outcome in outcomes] == [1, 2]


def test_what_has_not_the_type_of_an_image_is_refused_alone_and_in_streams() -> None:
    no_image: Any = "street.jpg"
    images = [b"a", no_image, b"never told"]
    found: list[Any] = []

    async def stream(client: AsyncDetectorClient) -> None:
        async for outcome in client.stream(images):
            found.append(outcome)  # noqa: PERF401  # for what comes before the error

    async def ask(address: str) -> None:
        async with AsyncDetectorClient(address) as client:
            with pytest.raises(TypeError, match=ALLOWED):
                await client.detect(no_image)
            with pytest.raises(TypeError, match=ALLOWED):
                await stream(client)

    with serving(Detector()) as address:
        with DetectorClient(address) as client:
            with pytest.raises(TypeError, match=ALLOWED):
                client.detect(no_image)
            with pytest.raises(TypeError, match=ALLOWED):
                found.extend(client.stream(images))
        asyncio.run(ask(address))
    assert [(place, outcome.height) for place, outcome in found] == [(0, 1)] * 2


@no_pictures
@both_runs
def test_array_that_holds_no_picture_leaves_the_others_theirs(
    run: Callable[..., Run], shape: tuple[int, ...]
) -> None:
    with serving(Detector()) as address:
        found = run(address, [b"a", np.zeros(shape, np.uint8), b"ccc"], concurrency=1)
    assert found.end is None
    first, refused, last = found.outcomes
    assert (first.height, last.height) == (1, 3)
    assert isinstance(refused, RefusedError)
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert str(list(shape)) in str(refused)
    assert "[H, W, 3]" in str(refused)


@both_runs
def test_array_is_taken_however_it_lies_in_memory(run: Callable[..., Run]) -> None:
    pixels = np.zeros((3, 8, 9), np.uint8).transpose(1, 2, 0)
    with serving(Detector()) as address:
        (found,) = run(address, [pixels]).outcomes
    assert isinstance(found, Detections)
