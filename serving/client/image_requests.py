"""Helpers of the sync and async clients: image encoding, size limits, and error handling."""

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, Generic, TypeGuard, TypeVar

import grpc
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ...model.image_files import read_image_file
from ...model.image_limits import ImageError
from ...protos.maskrcnn.v1 import detector_pb2 as pb
from ..detections import (
    DEFAULT_SCHEDULING,
    DetectionOptions,
    Detections,
    MaskFormat,
    SchedulingOptions,
)
from ..errors import AccessError, ClientError, ClosedError, DeadlineError, RefusedError
from ..messages import detections_from_response, request_from_options

# Input image: content of a JPEG, PNG or WebP file, path of an image file, or RGB pixels [H, W, 3].
ImageSource = bytes | Path | NDArray[np.uint8]

# Outcome of one image: its detections or the error. OSError: the image's file cannot be read.
ImageOutcome = Detections | ClientError | OSError

TOO_LARGE_REMEDY = "send a smaller image, or start the server with a higher --max-message-mb"

# gRPC's default message limit in bytes. For smaller requests the server's limit is not fetched,
# because few servers have a limit below gRPC's default.
_UNCHECKED_BYTES = 4 << 20
_STATUS_FROM_NUMBER = {status.value[0]: status for status in grpc.StatusCode}

_T = TypeVar("_T")


def request_from_image(
    image: ImageSource,
    options: DetectionOptions,
    scheduling: SchedulingOptions = DEFAULT_SCHEDULING,
    request_id: str = "",
) -> pb.DetectRequest:
    """Return the request message for an image.

    An array is sent as PNG. A BMP or TIFF file that is given as a path is converted to PNG.
    `request_id` may be empty. The server returns it with the response.

    Raises:
        TypeError: `image` is not an `ImageSource`.
        RefusedError: The array is empty or not of shape [H, W, 3]; or the path is a pipe or device;
            or the image file exceeds `MAX_FILE_BYTES`, has an unsupported format, or is a damaged
            BMP or TIFF. The status is INVALID_ARGUMENT.
        OSError: The file cannot be read.
    """
    return request_from_options(_encoded_image(image), options, scheduling, request_id)


def _encoded_image(image: ImageSource) -> bytes:
    if isinstance(image, bytes):
        return image
    if isinstance(image, Path):
        try:
            return read_image_file(image)
        except ImageError as error:
            raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
    _check_pixels(image)
    file = BytesIO()
    # Lowest compression level, because higher ones would slow down the client.
    Image.fromarray(image).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _check_pixels(image: Any) -> None:
    is_array = isinstance(image, np.ndarray)
    if not is_array or image.dtype != np.uint8:
        kind = f"array of {image.dtype}" if is_array else type(image).__name__
        remedy = "; wrap a path in Path" if isinstance(image, str) else ""
        raise TypeError(
            "an image must be the bytes of a file, a pathlib.Path or a uint8 array [H, W, 3], not "
            f"{kind}{remedy}"
        )
    if image.ndim != 3 or image.shape[2] != 3 or not image.size:
        raise RefusedError(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"an array of shape {list(image.shape)} is not an image; it must be [H, W, 3] RGB and "
            "not empty",
        )


def is_large(request: pb.DetectRequest) -> bool:
    """Return whether a request exceeds 4 MiB, gRPC's default message limit.

    If so, the request may also exceed the server's limit, so the caller must call `check_size`
    before it sends the request.
    """
    return request.ByteSize() > _UNCHECKED_BYTES


def is_unreachable(state: grpc.ChannelConnectivity) -> bool:
    """Return whether `state` means that the channel failed to connect to the server.

    If so, the caller must not fetch the server's limits.
    """
    # Otherwise, each large image would wait until a fetch of the limits has failed, one image after
    # the other.
    return state is grpc.ChannelConnectivity.TRANSIENT_FAILURE


def check_size(request: pb.DetectRequest, limits: pb.Limits | None, address: str) -> None:
    """Check that a request does not exceed the server's message limit.

    Args:
        request: The request.
        limits: Limits from the server's GetModel response. None: unknown, so check nothing.
        address: The server's address, for the error message.

    Raises:
        RefusedError: The request is too large; status INVALID_ARGUMENT.
    """
    # The server would reject the request too, but only after all of it has arrived, and gRPC would
    # retry it.
    size, limit = request.ByteSize(), limits.max_message_bytes if limits else 0
    if 0 < limit < size:
        raise RefusedError(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the request has {size:,} bytes, but the server at {address} accepts at most "
            f"{limit:,}; {TOO_LARGE_REMEDY}",
        )


def check_concurrency(concurrency: int) -> None:
    """Raise ValueError if `concurrency`, the number of in-flight requests, is less than 1."""
    if concurrency < 1:
        raise ValueError(f"concurrency is {concurrency}; give 1 or more")


def outcome_from_stream_response(
    response: pb.DetectStreamResponse, mask_format: MaskFormat
) -> tuple[int, Detections | RefusedError]:
    """Return an image's index in the stream, and the image's detections or the server's error.

    The masks of the detections have the format `mask_format`, as requested.
    """
    if response.HasField("error"):
        status = _STATUS_FROM_NUMBER[response.error.code]
        return int(response.id), RefusedError(status, response.error.message)
    return int(response.id), detections_from_response(response.response, mask_format)


class DeferredErrors(Generic[_T]):
    """Wrapper of an iterable. If the iterable raises an error, the iteration ends without raising.

    The error is stored, and the method `check` raises it. The caller calls `check` after it has
    delivered the results of the preceding items.
    """

    # If a stream's request iterator raised an error, gRPC would drop both the error and the
    # outstanding responses.

    def __init__(self, items: Iterable[_T] | AsyncIterable[_T]) -> None:
        """Wrap an iterable. If it is sync, the wrapper supports both `for` and `async for`."""
        self._items = items
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[_T]:
        assert isinstance(self._items, Iterable)
        try:
            # Not `yield from`, which would close the caller's generator.
            for item in self._items:  # noqa: UP028
                yield item
        except Exception as error:
            self._error = error

    async def __aiter__(self) -> AsyncIterator[_T]:
        try:
            async for item in async_items(self._items):
                yield item
        except Exception as error:
            self._error = error

    def check(self) -> None:
        """Raise the error that the wrapped iterable raised, if any."""
        if self._error is not None:
            raise self._error


async def async_items(items: Iterable[_T] | AsyncIterable[_T]) -> AsyncIterator[_T]:
    """Iterate over a sync or async iterable."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


class LostServerCheck:
    """Counter of consecutive requests without a response, which detects a lost server.

    A missed deadline counts only if the connection is down. If the connection is up, the server is
    assumed to be overloaded, not lost.
    """

    def __init__(self, limit: int, state: Callable[[], grpc.ChannelConnectivity]) -> None:
        """Create the counter of requests without a response, starting at zero.

        Args:
            limit: Consecutive requests without a response after which the server counts as lost.
            state: Function that returns the connectivity of the client's gRPC channel.
        """
        self._limit = limit
        self._state = state
        self._unanswered = 0

    def check(self, outcome: ImageOutcome) -> ImageOutcome:
        """Update the counter with the outcome of one request. Call it in the requests' order.

        If the outcome is an error after which the caller should send no more requests, raise it.
        Otherwise, return the outcome.

        Raises:
            AccessError: The server denies access to this client.
            ClosedError: The client is closed.
            RefusedError: The server does not serve the model that the requests name.
            ClientError: The server counts as lost: `limit` (see the constructor) consecutive
                requests, including this one, got no response.
        """
        if isinstance(outcome, AccessError | ClosedError) or (
            isinstance(outcome, RefusedError) and outcome.code is grpc.StatusCode.NOT_FOUND
        ):
            raise outcome
        if self._is_unanswered(outcome):
            self._unanswered += 1
            if self._unanswered >= self._limit:
                raise outcome
        elif not isinstance(outcome, OSError):  # an unreadable file was never sent
            self._unanswered = 0
        return outcome

    def _is_unanswered(self, outcome: ImageOutcome) -> TypeGuard[ClientError]:
        if isinstance(outcome, DeadlineError):
            return self._state() is not grpc.ChannelConnectivity.READY
        return isinstance(outcome, ClientError) and not isinstance(outcome, RefusedError)
