"""A client of the server for threads."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Self

import grpc

from ...protos.maskrcnn.v1 import detector_pb2 as pb
from ..detections import DEFAULT_OPTIONS, DetectionOptions, Detections
from ..errors import ClientError, RefusedError
from ..messages import detections_from_response
from ..scheduling import DEFAULT_TERMS, RequestTerms
from .connection import (
    Connection,
    Outcome,
    Silence,
    channel_state,
    check_concurrency,
    check_size,
    is_large,
)
from .image_requests import (
    ImageSource,
    UntilFailure,
    outcome_from_answer,
    request_from_image,
)

_SHUTDOWN = grpc.ChannelConnectivity.SHUTDOWN


class DetectorClient(Connection):
    """A connection to a server; usable as a context manager and from several threads."""

    _transport = grpc
    _lock = threading.Lock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; what waits for an answer ends with a ClosedError."""
        self._closed = True
        self._channel.close()

    def model(self) -> pb.GetModelResponse:
        """What the server serves.

        Raises:
            ClosedError: the client is closed.
            ClientError: the server gave no answer.
        """
        request = pb.GetModelRequest()
        with self._meaning_of_errors():
            response: pb.GetModelResponse = self._stub.GetModel(
                request, timeout=self._timeout_s, metadata=self._metadata
            )
        return response

    def detect(
        self,
        image: ImageSource,
        options: DetectionOptions = DEFAULT_OPTIONS,
        terms: RequestTerms = DEFAULT_TERMS,
    ) -> Detections:
        """Detect in one image.

        Args:
            image: The image.
            options: What to answer with.
            terms: How the server is to compute it: in which precision, how urgently, and how long
                it may take to do so.

        Raises:
            TypeError: the image is no ImageSource, as a path that is a str.
            RefusedError: the server refused the image, the options or the terms, or takes no
                request as large as this; or an array is empty or not [H, W, 3]. The last two are
                INVALID_ARGUMENT.
            ClosedError: the client is closed.
            ClientError: the server gave no answer.
            OSError: the image's file cannot be read.
        """
        return self._result(self._send(image, options, terms), options)

    def detect_many(
        self,
        images: Iterable[ImageSource],
        options: DetectionOptions = DEFAULT_OPTIONS,
        terms: RequestTerms = DEFAULT_TERMS,
        *,
        concurrency: int = 8,
    ) -> Iterator[Outcome]:
        """Detect in images, with `concurrency` requests in flight.

        Yields:
            In the order of the images, the detections or what `detect` raises instead: one that
            cannot be read, is refused or gets no answer leaves the others theirs.

        Raises:
            ValueError: `concurrency` is less than 1; this is raised at once.
            TypeError: an image is no ImageSource. This and what `images` raises come once the
                images before are answered.
            AccessError: the server gives this client no access.
            ClosedError: the client is closed.
            ClientError: as many requests in a row as are in flight got no answer, for then the
                server is gone; it is the last one's. What the server refuses is answered, and
                what it is too busy for in `timeout_s` leaves it there.
        """
        check_concurrency(concurrency)
        return self._outcomes(UntilFailure(images), options, terms, concurrency)

    def stream(
        self,
        images: Iterable[ImageSource],
        options: DetectionOptions = DEFAULT_OPTIONS,
        terms: RequestTerms = DEFAULT_TERMS,
    ) -> Iterator[tuple[int, Detections | RefusedError]]:
        """Detect in images over one stream, which is read from another thread.

        Yields:
            As they come, the place of an image and its detections or why the server refused.

        Raises:
            ClosedError: the client is closed.
            ClientError: the stream broke.
            Exception: what `images` raised, or `detect` would for one of them before it asks the
                server; it comes once those before are answered.
        """
        requests = UntilFailure(
            self._request(options, terms, image, str(place)) for place, image in enumerate(images)
        )
        with self._meaning_of_errors():
            call = self._stub.DetectStream(iter(requests), metadata=self._metadata)
            try:
                for answer in call:
                    yield outcome_from_answer(answer, options.mask_format)
            finally:
                call.cancel()
        requests.check()

    def _outcomes(
        self,
        images: UntilFailure[ImageSource],
        options: DetectionOptions,
        terms: RequestTerms,
        concurrency: int,
    ) -> Iterator[Outcome]:
        silence = Silence(concurrency, self._state)
        calls: deque[Any] = deque()
        try:
            for image in images:
                if len(calls) == concurrency:
                    yield silence.check(self._outcome(calls.popleft(), options))
                calls.append(self._send(image, options, terms))
            while calls:
                yield silence.check(self._outcome(calls.popleft(), options))
        finally:
            for call in calls:
                call.cancel()
        images.check()

    def _state(self) -> grpc.ChannelConnectivity:
        return _SHUTDOWN if self._closed else channel_state(self._channel)

    def _request(
        self,
        options: DetectionOptions,
        terms: RequestTerms,
        image: ImageSource,
        request_id: str = "",
    ) -> pb.DetectRequest:
        request = request_from_image(image, options, terms, request_id)
        if is_large(request):
            with self._asking:
                self._limits = self._limits or self.model().limits
            check_size(request, self._limits, self._address)
        return request

    def _send(self, image: ImageSource, options: DetectionOptions, terms: RequestTerms) -> Any:
        """A call for an image, or something like it that raises why none could be made."""
        try:
            request = self._request(options, terms, image)
            with self._meaning_of_errors():
                return self._stub.Detect.future(
                    request, timeout=self._timeout_s, metadata=self._metadata
                )
        except Exception as error:
            unsent: Future[Any] = Future()
            unsent.set_exception(error)
            return unsent

    def _result(self, call: Any, options: DetectionOptions) -> Detections:
        with self._meaning_of_errors():
            return detections_from_response(call.result(), options.mask_format)

    def _outcome(self, call: Any, options: DetectionOptions) -> Outcome:
        try:
            return self._result(call, options)
        except (ClientError, OSError) as error:
            return error
