"""Clients of the server, sync and async."""

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Self

import grpc

from ..protos.maskrcnn.v1 import detector_pb2 as pb
from .connection import (
    Connection,
    Outcome,
    Silence,
    channel_state,
    check_concurrency,
    check_size,
    is_large,
)
from .detections import DEFAULT_OPTIONS, DetectionOptions, Detections
from .errors import ClientError, RefusedError
from .image_requests import (
    ImageSource,
    UntilFailure,
    async_items,
    outcome_from_answer,
    request_from_image,
)
from .messages import detections_from_response
from .scheduling import DEFAULT_TERMS, RequestTerms

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
            response: pb.GetModelResponse = self._stub.GetModel(request, timeout=self._timeout_s)
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
            call = self._stub.DetectStream(iter(requests))
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
                return self._stub.Detect.future(request, timeout=self._timeout_s)
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


class AsyncDetectorClient(Connection):
    """A connection to a server for one event loop; usable as an async context manager."""

    _transport = grpc.aio
    _lock = asyncio.Lock

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection as `DetectorClient.close` does."""
        self._closed = True
        await self._channel.close(None)

    async def model(self) -> pb.GetModelResponse:
        """What the server serves; raises as `DetectorClient.model` does."""
        request = pb.GetModelRequest()
        with self._meaning_of_errors():
            response: pb.GetModelResponse = await self._stub.GetModel(
                request, timeout=self._timeout_s
            )
        return response

    async def detect(
        self,
        image: ImageSource,
        options: DetectionOptions = DEFAULT_OPTIONS,
        terms: RequestTerms = DEFAULT_TERMS,
    ) -> Detections:
        """Detect in one image; raises as `DetectorClient.detect` does."""
        request = await self._request(options, terms, image)
        with self._meaning_of_errors():
            response = await self._stub.Detect(request, timeout=self._timeout_s)
        return detections_from_response(response, options.mask_format)

    def detect_many(
        self,
        images: Iterable[ImageSource] | AsyncIterable[ImageSource],
        options: DetectionOptions = DEFAULT_OPTIONS,
        terms: RequestTerms = DEFAULT_TERMS,
        *,
        concurrency: int = 8,
    ) -> AsyncIterator[Outcome]:
        """Detect in images as `DetectorClient.detect_many` does."""
        check_concurrency(concurrency)
        return self._outcomes(UntilFailure(images), options, terms, concurrency)

    async def stream(
        self,
        images: Iterable[ImageSource] | AsyncIterable[ImageSource],
        options: DetectionOptions = DEFAULT_OPTIONS,
        terms: RequestTerms = DEFAULT_TERMS,
    ) -> AsyncIterator[tuple[int, Detections | RefusedError]]:
        """Detect in images over one stream as `DetectorClient.stream` does."""
        places = itertools.count()
        requests = UntilFailure(
            await self._request(options, terms, image, str(next(places)))
            async for image in async_items(images)
        )
        with self._meaning_of_errors():
            call = self._stub.DetectStream(aiter(requests))
            try:
                async for answer in call:
                    yield outcome_from_answer(answer, options.mask_format)
            finally:
                call.cancel()
        requests.check()

    async def _outcomes(
        self,
        images: UntilFailure[ImageSource],
        options: DetectionOptions,
        terms: RequestTerms,
        concurrency: int,
    ) -> AsyncIterator[Outcome]:
        silence = Silence(concurrency, self._channel.get_state)
        tasks: deque[asyncio.Task[Outcome]] = deque()
        try:
            async for image in images:
                if len(tasks) == concurrency:
                    yield silence.check(await tasks.popleft())
                tasks.append(asyncio.create_task(self._outcome(image, options, terms)))
            while tasks:
                yield silence.check(await tasks.popleft())
        finally:
            for task in tasks:
                task.cancel()
        images.check()

    async def _request(
        self,
        options: DetectionOptions,
        terms: RequestTerms,
        image: ImageSource,
        request_id: str = "",
    ) -> pb.DetectRequest:
        request = await asyncio.to_thread(request_from_image, image, options, terms, request_id)
        if is_large(request):
            async with self._asking:
                self._limits = self._limits or (await self.model()).limits
            check_size(request, self._limits, self._address)
        return request

    async def _outcome(
        self, image: ImageSource, options: DetectionOptions, terms: RequestTerms
    ) -> Outcome:
        try:
            return await self.detect(image, options, terms)
        except (ClientError, OSError) as error:
            return error
