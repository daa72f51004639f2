"""Sync and async clients of the gRPC server."""

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Self

import grpc

from ...model.image_files import ImageSource, check_images
from ...protos.maskrcnn.v1 import detector_pb2 as pb
from ..detections import (
    DEFAULT_OPTIONS,
    DEFAULT_SCHEDULING,
    DetectionOptions,
    Detections,
    SchedulingOptions,
    check_count,
)
from ..errors import ClientError, DeferredErrors, RefusedError, async_items
from ..messages import detections_from_response
from .connection import LOOP_REMEDY, Connection, channel_state
from .image_requests import (
    ImageOutcome,
    LostServerCheck,
    check_size,
    is_large,
    is_unreachable,
    outcome_from_stream_response,
    request_from_image,
)


class DetectorClient(Connection):
    """Sync client of one server. Thread-safe. A context manager that closes the connection."""

    _transport = grpc
    _lock = threading.Lock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Pending calls raise ClosedError."""
        self._closed = True
        self._channel.close()

    def model(self) -> pb.GetModelResponse:
        """Return a description of the server's first model, and the server's limits.

        Raises:
            ClosedError: The client is closed.
            ClientError: The request failed.
        """
        request = pb.GetModelRequest()
        with self._translated_errors():
            response: pb.GetModelResponse = self._stub.GetModel(
                request, timeout=self._timeout_s, metadata=self._metadata
            )
        return response

    def detect(
        self,
        image: ImageSource,
        options: DetectionOptions = DEFAULT_OPTIONS,
        scheduling: SchedulingOptions = DEFAULT_SCHEDULING,
    ) -> Detections:
        """Detect objects in one image.

        Args:
            image: Content of an image file, path of such a file, or RGB pixels [H, W, 3] uint8.
            options: Options that select the detections to return and the format of their masks.
            scheduling: Model, precision, priority and time limit of the request in the server.

        Raises:
            TypeError: `image` is not an `ImageSource`, for example a path given as str. Or
                `options` or `scheduling` has a wrong type.
            RefusedError: The server rejected the request. Or the client rejected it with status
                INVALID_ARGUMENT before sending it: the request exceeds the server's message limit,
                or the file or array is not a valid image.
            AccessError: The server denies access to this client.
            ClosedError: The client is closed.
            ClientError: The server did not respond.
            OSError: The image's file cannot be read.
        """
        return self._result(self._send(image, options, scheduling), options)

    def detect_many(
        self,
        images: Iterable[ImageSource],
        options: DetectionOptions = DEFAULT_OPTIONS,
        scheduling: SchedulingOptions = DEFAULT_SCHEDULING,
        *,
        concurrency: int = 8,
    ) -> Iterator[ImageOutcome]:
        """Detect objects in many images, with up to `concurrency` requests in flight.

        Yields:
            For each image, in order, its detections or the error that `detect` would raise. An
            image that is unreadable, rejected or without a response does not affect the others.

        Raises:
            ValueError: `concurrency` is not an integer of 1 or more. Raised before the iteration
                starts.
            TypeError: `images` is one image, not several. Raised before the iteration starts.
            Exception: Iterating over `images` raised this error, or an image is not an
                `ImageSource` (TypeError). The error is raised after the outcomes of the preceding
                images.
            AccessError: The server denies access to this client.
            ClosedError: The client is closed.
            RefusedError: The server does not serve the model or precision in `scheduling`.
            ClientError: `concurrency` consecutive requests got no response, so the server counts
                as lost. A rejection counts as a response. A missed deadline counts as a response
                if the connection is up.
        """
        check_images(images)
        check_count("concurrency", concurrency)
        return self._outcomes(DeferredErrors(images), options, scheduling, concurrency)

    def stream(
        self,
        images: Iterable[ImageSource],
        options: DetectionOptions = DEFAULT_OPTIONS,
        scheduling: SchedulingOptions = DEFAULT_SCHEDULING,
    ) -> Iterator[tuple[int, Detections | RefusedError]]:
        """Detect objects in many images over one gRPC stream.

        gRPC iterates over `images` in another thread.

        Yields:
            For each image, in order of completion: its index in `images` from 0, and its detections
            or the server's error.

        Raises:
            ClosedError: The client is closed.
            ClientError: The gRPC stream failed.
            TypeError: `images` is one image, not several. Raised before the iteration starts.
            Exception: Iterating over `images` raised this error, or an image cannot be sent. For
                example, its file is unreadable (OSError), or the image is not an `ImageSource`
                (TypeError). The error is raised after the outcomes of the preceding images.
        """
        check_images(images)
        return self._stream(images, options, scheduling)

    def _stream(
        self,
        images: Iterable[ImageSource],
        options: DetectionOptions,
        scheduling: SchedulingOptions,
    ) -> Iterator[tuple[int, Detections | RefusedError]]:
        requests = DeferredErrors(
            self._request(options, scheduling, image, str(index))
            for index, image in enumerate(images)
        )
        with self._translated_errors():
            call = self._stub.DetectStream(iter(requests), metadata=self._metadata)
            try:
                for response in call:
                    yield outcome_from_stream_response(response, options.mask_format)
            finally:
                call.cancel()
        requests.check()

    def _outcomes(
        self,
        images: DeferredErrors[ImageSource],
        options: DetectionOptions,
        scheduling: SchedulingOptions,
        concurrency: int,
    ) -> Iterator[ImageOutcome]:
        lost_server = LostServerCheck(concurrency, self._state)
        # In-flight calls, in the order of the images.
        calls: deque[Any] = deque()
        try:
            for image in images:
                if len(calls) == concurrency:
                    yield lost_server.check(self._outcome(calls.popleft(), options))
                calls.append(self._send(image, options, scheduling))
            while calls:
                yield lost_server.check(self._outcome(calls.popleft(), options))
        finally:  # also if the caller closes the generator early
            for call in calls:
                call.cancel()
        images.check()

    def _state(self) -> grpc.ChannelConnectivity:
        return grpc.ChannelConnectivity.SHUTDOWN if self._closed else channel_state(self._channel)

    def _request(
        self,
        options: DetectionOptions,
        scheduling: SchedulingOptions,
        image: ImageSource,
        request_id: str = "",
    ) -> pb.DetectRequest:
        request = request_from_image(image, options, scheduling, request_id)
        if is_large(request):
            with self._limits_lock:  # threads share one GetModel call
                if self._limits is None and not is_unreachable(self._state()):
                    self._limits = self.model().limits
            check_size(request, self._limits, self._address)
        return request

    def _send(
        self, image: ImageSource, options: DetectionOptions, scheduling: SchedulingOptions
    ) -> Any:
        """Start a `Detect` call, and return its future.

        If the request cannot be sent, the future's method `result` raises the error.
        """
        try:
            request = self._request(options, scheduling, image)
            with self._translated_errors():
                return self._stub.Detect.future(
                    request, timeout=self._timeout_s, metadata=self._metadata
                )
        except Exception as error:
            # Raised by `result()`, after the outcomes of the preceding images.
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def _result(self, call: Any, options: DetectionOptions) -> Detections:
        with self._translated_errors():
            return detections_from_response(call.result(), options.mask_format)

    def _outcome(self, call: Any, options: DetectionOptions) -> ImageOutcome:
        try:
            return self._result(call, options)
        except (ClientError, OSError) as error:
            return error


class AsyncDetectorClient(Connection):
    """Async client of one server, for one event loop. An async context manager.

    Its methods correspond to those of `DetectorClient` and raise the same errors.

    Create the client in a coroutine of the event loop in which you use it. The constructor raises
    RuntimeError if no event loop is running. Methods that send requests raise RuntimeError if they
    are called in another event loop.
    """

    _transport = grpc.aio
    _lock = asyncio.Lock

    @staticmethod
    def _running_loop() -> asyncio.AbstractEventLoop:
        try:
            return asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(f"no event loop is running; {LOOP_REMEDY}") from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. Pending calls raise ClosedError."""
        self._closed = True
        await self._channel.close(None)

    async def model(self) -> pb.GetModelResponse:
        """Return a description of the server's first model, and the server's limits."""
        request = pb.GetModelRequest()
        with self._translated_errors():
            response: pb.GetModelResponse = await self._stub.GetModel(
                request, timeout=self._timeout_s, metadata=self._metadata
            )
        return response

    async def detect(
        self,
        image: ImageSource,
        options: DetectionOptions = DEFAULT_OPTIONS,
        scheduling: SchedulingOptions = DEFAULT_SCHEDULING,
    ) -> Detections:
        """Detect objects in one image. Arguments and errors: see `DetectorClient.detect`."""
        request = await self._request(options, scheduling, image)
        with self._translated_errors():
            response = await self._stub.Detect(
                request, timeout=self._timeout_s, metadata=self._metadata
            )
        return detections_from_response(response, options.mask_format)

    def detect_many(
        self,
        images: Iterable[ImageSource] | AsyncIterable[ImageSource],
        options: DetectionOptions = DEFAULT_OPTIONS,
        scheduling: SchedulingOptions = DEFAULT_SCHEDULING,
        *,
        concurrency: int = 8,
    ) -> AsyncIterator[ImageOutcome]:
        """Detect objects in many images, with up to `concurrency` requests in flight.

        Arguments and errors: see `DetectorClient.detect_many`.

        Yields:
            For each image, in order, its detections or its error.
        """
        check_images(images, Iterable | AsyncIterable)
        check_count("concurrency", concurrency)
        return self._outcomes(DeferredErrors(images), options, scheduling, concurrency)

    def stream(
        self,
        images: Iterable[ImageSource] | AsyncIterable[ImageSource],
        options: DetectionOptions = DEFAULT_OPTIONS,
        scheduling: SchedulingOptions = DEFAULT_SCHEDULING,
    ) -> AsyncIterator[tuple[int, Detections | RefusedError]]:
        """Detect objects in many images over one gRPC stream.

        Arguments and errors: see `DetectorClient.stream`.

        Yields:
            For each image, in order of completion: its index in `images` from 0, and its detections
            or the server's error.
        """
        check_images(images, Iterable | AsyncIterable)
        return self._stream(images, options, scheduling)

    async def _stream(
        self,
        images: Iterable[ImageSource] | AsyncIterable[ImageSource],
        options: DetectionOptions,
        scheduling: SchedulingOptions,
    ) -> AsyncIterator[tuple[int, Detections | RefusedError]]:
        indices = itertools.count()
        requests = DeferredErrors(
            await self._request(options, scheduling, image, str(next(indices)))
            async for image in async_items(images)
        )
        with self._translated_errors():
            call = self._stub.DetectStream(aiter(requests), metadata=self._metadata)
            try:
                async for response in call:
                    yield outcome_from_stream_response(response, options.mask_format)
            finally:
                call.cancel()
        requests.check()

    async def _outcomes(
        self,
        images: DeferredErrors[ImageSource],
        options: DetectionOptions,
        scheduling: SchedulingOptions,
        concurrency: int,
    ) -> AsyncIterator[ImageOutcome]:
        lost_server = LostServerCheck(concurrency, self._channel.get_state)
        tasks: deque[asyncio.Task[ImageOutcome]] = deque()
        try:
            async for image in images:
                if len(tasks) == concurrency:
                    yield lost_server.check(await tasks.popleft())
                tasks.append(asyncio.create_task(self._outcome(image, options, scheduling)))
            while tasks:
                yield lost_server.check(await tasks.popleft())
        finally:  # also if the caller closes the generator early
            for task in tasks:
                task.cancel()
        images.check()

    async def _request(
        self,
        options: DetectionOptions,
        scheduling: SchedulingOptions,
        image: ImageSource,
        request_id: str = "",
    ) -> pb.DetectRequest:
        # In a thread, because reading a file and encoding PNG would block the event loop.
        request = await asyncio.to_thread(
            request_from_image, image, options, scheduling, request_id
        )
        if is_large(request):
            async with self._limits_lock:  # tasks share one GetModel call
                if self._limits is None and not is_unreachable(self._channel.get_state()):
                    self._limits = (await self.model()).limits
            check_size(request, self._limits, self._address)
        return request

    async def _outcome(
        self, image: ImageSource, options: DetectionOptions, scheduling: SchedulingOptions
    ) -> ImageOutcome:
        try:
            return await self.detect(image, options, scheduling)
        except (ClientError, OSError) as error:
            return error
