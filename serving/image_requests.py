"""From images to the requests of a client, and from the answers of a stream to their outcomes."""

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..protos.maskrcnn.v1 import detector_pb2 as pb
from .detections import DetectionOptions, Detections, MaskFormat
from .errors import RefusedError
from .messages import detections_from_response, request_from_options
from .scheduling import DEFAULT_TERMS, RequestTerms

ImageSource = bytes | Path | NDArray[np.uint8]
"""The contents of a JPEG, PNG or WebP file, its path, or pixels [H, W, 3] RGB."""

_STATUS_FROM_NUMBER = {status.value[0]: status for status in grpc.StatusCode}


def request_from_image(
    image: ImageSource,
    options: DetectionOptions,
    terms: RequestTerms = DEFAULT_TERMS,
    request_id: str = "",
) -> pb.DetectRequest:
    """The request for an image; pixels travel as PNG.

    Raises:
        OSError: its file cannot be read.
    """
    return request_from_options(_encoded(image), options, terms, request_id)


class RequestStream:
    """The requests of a stream, whose ids count the images.

    An image that cannot be had or sent ends them: gRPC would drop the exception, and with it the
    answers to the images before.
    """

    def __init__(
        self,
        images: Iterable[ImageSource] | AsyncIterable[ImageSource],
        make: Callable[[ImageSource, str], Any],
    ) -> None:
        """Make a request of each image and its id, by a coroutine if they are iterated so."""
        self._images = images
        self._make = make
        self._failure: Exception | None = None

    def __iter__(self) -> Iterator[pb.DetectRequest]:
        assert isinstance(self._images, Iterable)
        try:
            for index, image in enumerate(self._images):
                yield self._make(image, str(index))
        except Exception as error:
            self._failure = error

    async def __aiter__(self) -> AsyncIterator[pb.DetectRequest]:
        index = 0
        try:
            async for image in async_images(self._images):
                yield await self._make(image, str(index))
                index += 1
        except Exception as error:
            self._failure = error

    def check(self) -> None:
        """Raise what ended the requests before their time."""
        if self._failure is not None:
            raise self._failure


async def async_images(
    images: Iterable[ImageSource] | AsyncIterable[ImageSource],
) -> AsyncIterator[ImageSource]:
    """The images, however they come."""
    if isinstance(images, AsyncIterable):
        async for image in images:
            yield image
    else:
        for image in images:
            yield image


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
    file = BytesIO()
    Image.fromarray(image).save(file, "PNG", compress_level=1)
    return file.getvalue()
