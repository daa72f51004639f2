"""gRPC request streams: back-pressure instead of rejections, and a graceful end at shutdown."""

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Generic, TypeVar

import grpc

from ..errors import StoppingError
from ..pipeline.pipeline import Pipeline

Request = TypeVar("Request")

# Context manager that holds a request's admission slots. Entering it waits for free slots, or
# raises QueueFullError if too many requests are waiting.
Admission = AbstractAsyncContextManager[None]

_Respond = Callable[[Request, Admission], Coroutine[Any, Any, Any]]
_Context = grpc.aio.ServicerContext[Any, Any]


class Streams(Generic[Request]):
    """Open request streams of a gRPC service.

    Each image of a request needs an admission slot. If too few slots are free, a request of a
    stream waits for them, even if it exceeds its connection's fair share of the slots. While it
    waits, no further request is read from its stream, so HTTP/2 flow control slows the client down.
    """

    def __init__(
        self, pipeline_of: Callable[[Request], Pipeline], image_count: Callable[[Request], int]
    ) -> None:
        """Create an empty set of gRPC request streams.

        Args:
            pipeline_of: Function that returns the pipeline that processes a request.
            image_count: Function that returns the number of images in a request. Each image needs
                an admission slot.
        """
        self._pipeline_of = pipeline_of
        self._image_count = image_count
        self._readers: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        """Stop reading requests. Each stream ends when the requests already read are processed."""
        for reader in self._readers:
            reader.cancel()

    async def process(
        self,
        requests: AsyncIterable[Request],
        respond: _Respond[Request],
        context: _Context,
        *,
        in_order: bool = False,
    ) -> None:
        """Process the requests of a stream concurrently until it ends.

        Args:
            requests: Requests of the stream.
            respond: Function that returns the response to a request. Arguments: the request, and a
                context manager that acquires one admission slot per image of the request. `respond`
                must compute the response within the `with` block of this context manager.
            context: gRPC context of the call, to which the responses are written.
            in_order: Whether to write the responses in the order of the requests.

        Raises:
            StoppingError: the server stopped before the stream ended.
        """
        stream = _OpenStream(respond, context, in_order=in_order)
        async with asyncio.TaskGroup() as tasks:
            reader = tasks.create_task(self._read(requests, context.peer(), stream, tasks))
            self._readers.add(reader)
            reader.add_done_callback(self._readers.discard)
        if reader.cancelled():
            raise StoppingError("the server is stopping")

    async def _read(
        self,
        requests: AsyncIterable[Request],
        peer: str,
        stream: "_OpenStream[Request]",
        tasks: asyncio.TaskGroup,
    ) -> None:
        async for request in requests:
            images, is_admitted = self._image_count(request), asyncio.Event()
            pipeline = self._pipeline_of(request)
            admission = _admission(pipeline, peer, images, is_admitted)
            task = tasks.create_task(stream.serve(request, images, admission))
            # An invalid request never enters `admission`, so the end of its task sets the event.
            task.add_done_callback(partial(_set, is_admitted))
            del request, admission, task
            await is_admitted.wait()
            await stream.wait_for_room(pipeline.stream_window)


class _OpenStream(Generic[Request]):
    """State of one stream: the number of its in-flight images and the order of its responses.

    An image is in flight until its response has been written.
    """

    def __init__(self, respond: _Respond[Request], context: _Context, *, in_order: bool) -> None:
        self._respond = respond
        self._context = context
        self._in_order = in_order
        # gRPC allows one write at a time.
        self._write_lock = asyncio.Lock()
        # Set when the response to the latest request has been written.
        self._last_written = asyncio.Event()
        self._last_written.set()
        # Number of in-flight images.
        self._images = 0
        self._changed = asyncio.Event()

    async def wait_for_room(self, images: int) -> None:
        """Wait until the stream has fewer than `images` in-flight images."""
        while self._images >= images:
            self._changed.clear()
            await self._changed.wait()

    async def serve(self, request: Request, images: int, admission: Admission) -> None:
        """Process a request, and write its response.

        Args:
            request: Message with the images.
            images: Number of images in the request.
            admission: Context manager that holds the admission slots of the request.
        """
        self._images += images
        previous, self._last_written = self._last_written, asyncio.Event()
        is_written = self._last_written
        responding = self._respond(request, admission)
        del request, admission  # only `responding` holds the request, which can be large
        try:
            response = await responding
            if self._in_order:
                await previous.wait()
            async with self._write_lock:
                await self._context.write(response)
            # If an error prevents this, the task group cancels the tasks of all later responses.
            is_written.set()
        finally:
            self._images -= images
            self._changed.set()


@contextlib.asynccontextmanager
async def _admission(
    pipeline: Pipeline, peer: str, images: int, is_admitted: asyncio.Event
) -> AsyncIterator[None]:
    async with pipeline.admission.acquire(peer, images, wait=True):
        is_admitted.set()
        yield


def _set(event: asyncio.Event, _: object) -> None:
    event.set()
