"""Clients of the server, sync and async."""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from types import TracebackType
from typing import Any, Self

import grpc

from ..protos.maskrcnn.v1 import detector_pb2 as pb
from ..protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from .config import MAX_RETRIES
from .connection import Credentials, channel_options, error_from_rpc
from .detections import DEFAULT_OPTIONS, DetectionOptions, Detections
from .errors import RefusedError
from .image_requests import (
    ImageSource,
    RequestStream,
    async_images,
    outcome_from_answer,
    request_from_image,
)
from .messages import detections_from_response
from .scheduling import DEFAULT_TERMS, RequestTerms


class DetectorClient:
    """A connection to a server; usable as a context manager and from several threads."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 30.0,
        retries: int = MAX_RETRIES,
        credentials: Credentials | None = None,
    ) -> None:
        """Prepare a connection, which is made by the first request.

        Args:
            address: `host:port` of the server, or any name that gRPC resolves.
            timeout_s: Longest wait for the answer to a request, over all its tries; a stream has
                no such limit.
            retries: Times that a request is sent again if the server is too busy or away, as
                `connection.channel_options` says.
            credentials: For TLS; none, the connection is not encrypted.
        """
        self._address = address
        self._timeout_s = timeout_s
        options = channel_options(retries)
        self._channel = (
            grpc.insecure_channel(address, options)
            if credentials is None
            else grpc.secure_channel(address, credentials.channel_credentials(), options)
        )
        self._stub: Any = DetectorStub(self._channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def model(self) -> pb.GetModelResponse:
        """What the server serves.

        Raises:
            ClientError: the server gave no answer.
        """
        try:
            response: pb.GetModelResponse = self._stub.GetModel(
                pb.GetModelRequest(), timeout=self._timeout_s
            )
        except grpc.RpcError as error:
            raise error_from_rpc(error, self._address) from error
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
            RefusedError: the server refused the image, the options or the terms.
            ClientError: the server gave no answer.
        """
        return self._result(self._send(image, options, terms), options)

    def detect_many(
        self,
        images: Iterable[ImageSource],
        options: DetectionOptions = DEFAULT_OPTIONS,
        terms: RequestTerms = DEFAULT_TERMS,
        *,
        concurrency: int = 8,
    ) -> Iterator[Detections | RefusedError]:
        """Detect in images, with `concurrency` requests in flight.

        Yields:
            In the order of the images, the detections or why the server refused.

        Raises:
            ClientError: the server gave no answer.
        """
        calls: deque[Any] = deque()
        try:
            for image in images:
                if len(calls) == concurrency:
                    yield self._outcome(calls.popleft(), options)
                calls.append(self._send(image, options, terms))
            while calls:
                yield self._outcome(calls.popleft(), options)
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
            ClientError: the stream broke.
        """
        requests = RequestStream(images, options, terms)
        call = self._stub.DetectStream(iter(requests))
        try:
            for answer in call:
                yield outcome_from_answer(answer, options.mask_format)
            requests.check()
        except grpc.RpcError as error:
            raise error_from_rpc(error, self._address) from error
        finally:
            call.cancel()

    def _send(self, image: ImageSource, options: DetectionOptions, terms: RequestTerms) -> Any:
        request = request_from_image(image, options, terms)
        return self._stub.Detect.future(request, timeout=self._timeout_s)

    def _result(self, call: Any, options: DetectionOptions) -> Detections:
        try:
            return detections_from_response(call.result(), options.mask_format)
        except grpc.RpcError as error:
            raise error_from_rpc(error, self._address) from error

    def _outcome(self, call: Any, options: DetectionOptions) -> Detections | RefusedError:
        try:
            return self._result(call, options)
        except RefusedError as error:
            return error


class AsyncDetectorClient:
    """A connection to a server for one event loop; usable as an async context manager."""

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 30.0,
        retries: int = MAX_RETRIES,
        credentials: Credentials | None = None,
    ) -> None:
        """Prepare a connection as `DetectorClient` does."""
        self._address = address
        self._timeout_s = timeout_s
        options = channel_options(retries)
        self._channel = (
            grpc.aio.insecure_channel(address, options)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials.channel_credentials(), options)
        )
        self._stub: Any = DetectorStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close(None)

    async def model(self) -> pb.GetModelResponse:
        """What the server serves; raises as `DetectorClient.model` does."""
        try:
            response: pb.GetModelResponse = await self._stub.GetModel(
                pb.GetModelRequest(), timeout=self._timeout_s
            )
        except grpc.RpcError as error:
            raise error_from_rpc(error, self._address) from error
        return response

    async def detect(
        self,
        image: ImageSource,
        options: DetectionOptions = DEFAULT_OPTIONS,
        terms: RequestTerms = DEFAULT_TERMS,
    ) -> Detections:
        """Detect in one image; raises as `DetectorClient.detect` does."""
        request = await asyncio.to_thread(request_from_image, image, options, terms)
        try:
            response = await self._stub.Detect(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise error_from_rpc(error, self._address) from error
        return detections_from_response(response, options.mask_format)

    async def detect_many(
        self,
        images: Iterable[ImageSource] | AsyncIterable[ImageSource],
        options: DetectionOptions = DEFAULT_OPTIONS,
        terms: RequestTerms = DEFAULT_TERMS,
        *,
        concurrency: int = 8,
    ) -> AsyncIterator[Detections | RefusedError]:
        """Detect in images as `DetectorClient.detect_many` does."""
        tasks: deque[asyncio.Task[Detections]] = deque()
        try:
            async for image in async_images(images):
                if len(tasks) == concurrency:
                    yield await _outcome(tasks.popleft())
                tasks.append(asyncio.create_task(self.detect(image, options, terms)))
            while tasks:
                yield await _outcome(tasks.popleft())
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
        requests = RequestStream(images, options, terms)
        call = self._stub.DetectStream(aiter(requests))
        try:
            async for answer in call:
                yield outcome_from_answer(answer, options.mask_format)
            requests.check()
        except grpc.RpcError as error:
            raise error_from_rpc(error, self._address) from error
        finally:
            call.cancel()


async def _outcome(task: asyncio.Task[Detections]) -> Detections | RefusedError:
    try:
        return await task
    except RefusedError as error:
        return error
