"""From images to the requests of a client, and from the answers of a stream to their outcomes."""

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ...protos.maskrcnn.v1 import detector_pb2 as pb
from ..detections import DetectionOptions, Detections, MaskFormat
from ..errors import RefusedError
from ..messages import detections_from_response, request_from_options
from ..scheduling import DEFAULT_TERMS, RequestTerms

ImageSource = bytes | Path | NDArray[np.uint8]
"""The contents of a JPEG, PNG or WebP file, its path, or pixels [H, W, 3] RGB."""

_T = TypeVar("_T")
_STATUS_FROM_NUMBER = {status.value[0]: status for status in grpc.StatusCode}


def request_from_image(
    image: ImageSource,
    options: DetectionOptions,
    terms: RequestTerms = DEFAULT_TERMS,
    request_id: str = "",
) -> pb.DetectRequest:
    """The request for an image; pixels travel as PNG.

    Raises:
        TypeError: it is no ImageSource.
        RefusedError: an array has not the shape [H, W, 3] or is empty, INVALID_ARGUMENT.
        OSError: its file cannot be read.
    """
    return request_from_options(_encoded(image), options, terms, request_id)


class UntilFailure(Generic[_T]):
    """Images, or requests of a stream, until one cannot be had.

    The error waits for `check`, so that those before are answered first; of a stream, gRPC would
    drop it, and with it their answers.
    """

    def __init__(self, items: Iterable[_T] | AsyncIterable[_T]) -> None:
        """Take them to be iterated as they can be; if they are not async, in either way."""
        self._items = items
        self._failure: Exception | None = None

    def __iter__(self) -> Iterator[_T]:
        assert isinstance(self._items, Iterable)
        try:
            for item in self._items:  # noqa: UP028  # it would close a generator of the caller's
                yield item
        except Exception as error:
            self._failure = error

    async def __aiter__(self) -> AsyncIterator[_T]:
        try:
            async for item in async_items(self._items):
                yield item
        except Exception as error:
            self._failure = error

    def check(self) -> None:
        """Raise what ended them before their time."""
        if self._failure is not None:
            raise self._failure


async def async_items(items: Iterable[_T] | AsyncIterable[_T]) -> AsyncIterator[_T]:
    """The items, however they come."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


def outcome_from_answer(
    answer: pb.DetectStreamResponse, mask_format: MaskFormat
) -> tuple[int, Detections | RefusedError]:
    """The place of an image in its stream, and its detections or why the server refused."""
    if answer.HasField("error"):
        status = _STATUS_FROM_NUMBER[answer.error.code]
        return int(answer.id), RefusedError(status, answer.error.message)
    return int(answer.id), detections_from_response(answer.response, mask_format)


def _encoded(image: ImageSource) -> bytes:
    if isinstance(image, bytes):
        return image
    if isinstance(image, Path):
        return image.read_bytes()
    _check_pixels(image)
    file = BytesIO()
    Image.fromarray(image).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _check_pixels(image: Any) -> None:
    is_array = isinstance(image, np.ndarray)
    if not is_array or image.dtype != np.uint8:
        kind = f"array of {image.dtype}" if is_array else type(image).__name__
        remedy = "; wrap a path in Path" if isinstance(image, str) else ""
        raise TypeError(
            "an image is the bytes of a file, a pathlib.Path or a uint8 array [H, W, 3], not "
            f"{kind}{remedy}"
        )
    if image.ndim != 3 or image.shape[2] != 3 or not image.size:
        raise RefusedError(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"an array of shape {list(image.shape)} holds no picture; it must be [H, W, 3] RGB",
        )
