"""Images of invalid types and shapes."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from many_requests import NO_LISTS, Run, both_runs, kind_of
from stub_server import StubDetector, stub_server

from maskrcnn_trt.serving.client import AsyncDetectorClient, DetectorClient
from maskrcnn_trt.serving.detections import DEFAULT_OPTIONS, Detections
from maskrcnn_trt.serving.errors import RefusedError

ALLOWED = r"bytes of a file, a pathlib\.Path or a uint8 array \[H, W, 3\]"


@pytest.mark.parametrize(
    ("image", "kind"),
    [
        ("street.jpg", "str"),
        (bytearray(b"x"), "bytearray"),
        (None, "NoneType"),
        (io.BytesIO(b"x"), "BytesIO"),
        (np.zeros((8, 8, 3), np.float32), "array of float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@both_runs
def test_invalid_type_ends_a_run(run: Callable[..., Run], image: Any, kind: str) -> None:
    outcomes: list[Any] = []
    with stub_server(StubDetector()) as address, pytest.raises(TypeError, match=ALLOWED) as caught:
        run(address, [b"a", b"bb", image, b"never sent"], concurrency=2, into=outcomes)
    assert f"not {kind}" in str(caught.value)
    assert ("wrap a path in Path" in str(caught.value)) == isinstance(image, str)
    assert [outcome.height for outcome in outcomes] == [1, 2]


async def test_invalid_type_is_rejected_by_detect_and_stream() -> None:
    invalid: Any = "street.jpg"
    images = [b"a", invalid, b"never sent"]
    results: list[Any] = []

    async def stream(client: AsyncDetectorClient) -> None:
        async for outcome in client.stream(images):
            results.append(outcome)  # noqa: PERF401  # to keep those before the error

    with stub_server(StubDetector()) as address:
        with DetectorClient(address) as client:
            with pytest.raises(TypeError, match=ALLOWED):
                client.detect(invalid)
            with pytest.raises(TypeError, match=ALLOWED):
                results.extend(client.stream(images))
        async with AsyncDetectorClient(address) as client:
            with pytest.raises(TypeError, match=ALLOWED):
                await client.detect(invalid)
            with pytest.raises(TypeError, match=ALLOWED):
                await stream(client)
    assert [(index, outcome.height) for index, outcome in results] == [(0, 1)] * 2


@pytest.mark.parametrize("image", NO_LISTS, ids=kind_of)
async def test_one_image_is_no_list(image: Any) -> None:
    with DetectorClient("localhost:1") as client:
        async with AsyncDetectorClient("localhost:1") as other:
            for method in (client.detect_many, client.stream, other.detect_many, other.stream):
                with pytest.raises(TypeError, match=f"must be a list.* {kind_of(image)}"):
                    method(image)  # type: ignore[operator]
            with pytest.raises(TypeError, match=r"must be a list.* async_generator"):
                client.stream(other.stream([]))  # type: ignore[arg-type]


async def test_options_of_another_class() -> None:
    invalid: Any = {"score_threshold": 0.5}
    message = r"class \w+Options, not dict"
    for arguments in ((invalid,), (DEFAULT_OPTIONS, invalid)):
        with DetectorClient("localhost:1") as client:
            with pytest.raises(TypeError, match=message):
                client.detect(b"a", *arguments)
            with pytest.raises(TypeError, match=message):
                list(client.detect_many([b"a"], *arguments))
        async with AsyncDetectorClient("localhost:1") as other:
            with pytest.raises(TypeError, match=message):
                await other.detect(b"a", *arguments)


@both_runs
def test_invalid_shapes_and_paths_do_not_affect_the_others(run: Callable[..., Run]) -> None:
    shapes = [(3, 8, 9), (0, 8, 3), (8, 0, 3), (8, 9), (8, 9, 4), (1, 8, 9, 3), ()]
    transposed = np.zeros((3, 8, 9), np.uint8).transpose(1, 2, 0)  # any memory layout is valid
    arrays = [np.zeros(shape, np.uint8) for shape in shapes]
    images = [b"a", *arrays, Path("a\0b.jpg"), transposed, b"ccc"]
    with stub_server(StubDetector()) as address:
        result = run(address, images, concurrency=1)
    assert result.error is None
    first, *refused, path, pixels, last = result.outcomes
    assert (first.height, last.height) == (1, 3)
    assert isinstance(pixels, Detections)
    assert isinstance(path, RefusedError)
    assert "the path is invalid" in str(path)
    for shape, outcome in zip(shapes, refused, strict=True):
        assert isinstance(outcome, RefusedError)
        assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT
        assert str(list(shape)) in str(outcome)
        assert "[H, W, 3]" in str(outcome)
