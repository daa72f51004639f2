"""A client of the server for an event loop."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Self

import grpc

from ...protos.maskrcnn.v1 import detector_pb2 as pb
from ..detections import DEFAULT_OPTIONS, DetectionOptions, Detections
from ..errors import ClientError, RefusedError
from ..messages import detections_from_response
from ..scheduling import DEFAULT_TERMS, RequestTerms
from .connection import Connection, Outcome, Silence, check_concurrency, check_size, is_large
from .image_requests import (
    ImageSource,
    UntilFailure,
    async_items,
    outcome_from_answer,
    request_from_image,
)


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
                request, timeout=self._timeout_s, metadata=self._metadata
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
            response = await self._stub.Detect(
                request, timeout=self._timeout_s, metadata=self._metadata
            )
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
            call = self._stub.DetectStream(aiter(requests), metadata=self._metadata)
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
