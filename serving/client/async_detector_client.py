"""Async client of the gRPC server."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Self

import grpc

from ...protos.maskrcnn.v1 import detector_pb2 as pb
from ..detections import (
    DEFAULT_OPTIONS,
    DEFAULT_SCHEDULING,
    DetectionOptions,
    Detections,
    SchedulingOptions,
)
from ..errors import ClientError, RefusedError
from ..messages import detections_from_response
from .connection import Connection
from .image_requests import (
    DeferredErrors,
    ImageOutcome,
    ImageSource,
    LostServerCheck,
    async_items,
    check_concurrency,
    check_size,
    is_large,
    outcome_from_stream_response,
    request_from_image,
)


class AsyncDetectorClient(Connection):
    """Async client of one server, for one event loop. An async context manager.

    Its methods correspond to those of `DetectorClient` and raise the same errors.
    """

    _transport = grpc.aio
    _lock = asyncio.Lock

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. Pending calls raise ClosedError."""
        self._closed = True
        await self._channel.close(None)

    async def model(self) -> pb.GetModelResponse:
        """Return the description of the served model and of the server's limits."""
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
        check_concurrency(concurrency)
        return self._outcomes(DeferredErrors(images), options, scheduling, concurrency)

    async def stream(
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
        # In a thread, because it reads files and encodes PNG.
        request = await asyncio.to_thread(
            request_from_image, image, options, scheduling, request_id
        )
        if is_large(request):
            async with self._limits_lock:  # tasks share one GetModel call
                self._limits = self._limits or (await self.model()).limits
            check_size(request, self._limits, self._address)
        return request

    async def _outcome(
        self, image: ImageSource, options: DetectionOptions, scheduling: SchedulingOptions
    ) -> ImageOutcome:
        try:
            return await self.detect(image, options, scheduling)
        except (ClientError, OSError) as error:
            return error
