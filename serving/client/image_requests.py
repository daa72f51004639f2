"""Helpers of the sync and async clients: image encoding, size limits, and error handling."""

from collections.abc import Callable
from io import BytesIO
from typing import TypeGuard

import grpc
from PIL import Image

from ...model.image_files import ImageSource, read_image_source
from ...model.image_limits import ImageError
from ...protos.maskrcnn.v1 import detector_pb2 as pb
from ..detections import (
    DEFAULT_SCHEDULING,
    DetectionOptions,
    Detections,
    MaskFormat,
    SchedulingOptions,
    check_options,
)
from ..errors import AccessError, ClientError, ClosedError, DeadlineError, RefusedError
from ..messages import detections_from_response, request_from_options

# Outcome of one image: its detections or the error. OSError: the image's file cannot be read.
ImageOutcome = Detections | ClientError | OSError

TOO_LARGE_REMEDY = "send a smaller image, or start the server with a higher --max-message-mb"

# Lowest message limit that a server can have, in bytes. Larger requests need `check_size`.
_UNCHECKED_BYTES = 1 << 20
_STATUS_FROM_NUMBER = {status.value[0]: status for status in grpc.StatusCode}


def request_from_image(
    image: ImageSource,
    options: DetectionOptions,
    scheduling: SchedulingOptions = DEFAULT_SCHEDULING,
    request_id: str = "",
) -> pb.DetectRequest:
    """Return the request message for an image.

    An array is sent as PNG. `request_id` may be empty. The server returns it with the response.

    Raises:
        RefusedError: `read_image_source` rejects the image. The status is INVALID_ARGUMENT.
        TypeError: `image`, `options` or `scheduling` has a wrong type.
        OSError: The file cannot be read.
    """
    check_options(options, scheduling)
    return request_from_options(_encoded_image(image), options, scheduling, request_id)


def _encoded_image(image: ImageSource) -> bytes:
    try:
        source = read_image_source(image)
    except ImageError as error:
        raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
    if isinstance(source, bytes):
        return source
    file = BytesIO()
    # Lowest compression level, because higher ones would slow down the client.
    Image.fromarray(source).save(file, "PNG", compress_level=1)
    return file.getvalue()


def is_large(request: pb.DetectRequest) -> bool:
    """Return whether a request exceeds 1 MiB, the lowest message limit that a server can have.

    If so, the caller must call `check_size` before it sends the request.
    """
    return request.ByteSize() > _UNCHECKED_BYTES


def is_unreachable(state: grpc.ChannelConnectivity) -> bool:
    """Return whether `state` means that the channel failed to connect to the server.

    If so, the caller must send a large request without first fetching the server's limits.
    """
    # Otherwise, one large image after the other would try to fetch the limits, and would wait until
    # the attempt fails.
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
        """Return a request's outcome, or raise it if the caller should send no more requests.

        The method also updates the counter. Call it in the order of the requests.

        Raises:
            AccessError: The server denies access to this client.
            ClosedError: The client is closed.
            RefusedError: The server does not serve the model or precision that the requests name.
            ClientError: The server counts as lost, because it did not respond to `limit` (see the
                constructor) consecutive requests, including this one.
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
