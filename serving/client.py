"""Clients of the server, sync and async."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

import grpc

from ..protos.maskrcnn.v1 import detector_pb2 as pb
from .connection import Connection, Outcome, Silence, check_size, is_large, meaning_of_errors
from .detections import DEFAULT_OPTIONS, DetectionOptions, Detections
from .errors import ClientError, RefusedError
from .image_requests import (
    ImageSource,
    RequestStream,
    async_images,
    outcome_from_answer,
    request_from_image,
)
from .messages import detections_from_response
from .scheduling import DEFAULT_TERMS, RequestTerms


class DetectorClient(Connection):
    """A connection to a server; usable as a context manager and from several threads."""

    _transport = grpc
    _lock = threading.Lock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def model(self) -> pb.GetModelResponse:
        """What the server serves.

        Raises:
            ClientError: the server gave no answer.
        """
        request = pb.GetModelRequest()
        with meaning_of_errors(self._address):
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
            RefusedError: the server refused the image, the options or the terms, or takes no
                request as large as this, which is INVALID_ARGUMENT.
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
            AccessError: the server gives this client no access.
            ClientError: as many requests in a row as are in flight got no answer, for then the
                server is gone; it is the last one's. What the server refuses is answered.
        """
        silence = Silence(concurrency)
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
            ClientError: the stream broke, or the server takes no request as large as an image's,
                which is raised once those before it are answered.
            OSError: the same, of an image whose file cannot be read.
        """
        requests = RequestStream(images, partial(self._request, options, terms))
        call = self._stub.DetectStream(iter(requests))
        try:
            with meaning_of_errors(self._address):
                for answer in call:
                    yield outcome_from_answer(answer, options.mask_format)
            requests.check()
        finally:
            call.cancel()

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
            return self._stub.Detect.future(request, timeout=self._timeout_s)
        except (ClientError, OSError) as error:
            unsent: Future[Any] = Future()
            unsent.set_exception(error)
            return unsent

    def _result(self, call: Any, options: DetectionOptions) -> Detections:
        with meaning_of_errors(self._address):
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
        """Close the connection."""
        await self._channel.close(None)

    async def model(self) -> pb.GetModelResponse:
        """What the server serves; raises as `DetectorClient.model` does."""
        request = pb.GetModelRequest()
        with meaning_of_errors(self._address):
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
        with meaning_of_errors(self._address):
            response = await self._stub.Detect(request, timeout=self._timeout_s)
        return detections_from_response(response, options.mask_format)

    async def detect_many(
        self,
        images: Iterable[ImageSource] | AsyncIterable[ImageSource],
        options: DetectionOptions = DEFAULT_OPTIONS,
        terms: RequestTerms = DEFAULT_TERMS,
        *,
        concurrency: int = 8,
    ) -> AsyncIterator[Outcome]:
        """Detect in images as `DetectorClient.detect_many` does."""
        silence = Silence(concurrency)
        tasks: deque[asyncio.Task[Outcome]] = deque()
        try:
            async for image in async_images(images):
                if len(tasks) == concurrency:
                    yield silence.check(await tasks.popleft())
                tasks.append(asyncio.create_task(self._outcome(image, options, terms)))
            while tasks:
                yield silence.check(await tasks.popleft())
        finally:
            for task in tasks:
                task.cancel()

    async def stream(
        self,
        images: Iterable[ImageSource] | AsyncIterable[ImageSource],
        options: DetectionOptions = DEFAULT_OPTIONS,
        terms: RequestTerms = DEFAULT_TERMS,
    ) -> AsyncIterator[tuple[int, Detections | RefusedError]]:
        """Detect in images over one stream as `DetectorClient.stream` does."""
        requests = RequestStream(images, partial(self._request, options, terms))
        call = self._stub.DetectStream(aiter(requests))
        try:
            with meaning_of_errors(self._address):
                async for answer in call:
                    yield outcome_from_answer(answer, options.mask_format)
            requests.check()
        finally:
            call.cancel()

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
