"""Streams of requests: read no faster than there are places, and ended when the server stops."""

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Generic, TypeVar

import grpc

from ..errors import StoppingError
from ..pipeline import Pipeline

Request = TypeVar("Request")

Place = AbstractAsyncContextManager[None]
"""What an answer is to be made within, which waits or refuses."""

_Answer = Callable[[Request, Place], Coroutine[Any, Any, Any]]
_Context = grpc.aio.ServicerContext[Any, Any]


class Streams(Generic[Request]):
    """The streams of a service, whose requests wait for their places.

    A client that asks for more than there are places for is not refused but read no further, and
    HTTP/2's flow control tells it to wait.
    """

    def __init__(self, pipeline: Pipeline, images: Callable[[Request], int]) -> None:
        """Read for a pipeline.

        Args:
            pipeline: What detects.
            images: Tells how many places a request takes.
        """
        self._pipeline = pipeline
        self._images = images
        self._readers: set[asyncio.Task[None]] = set()

    def stop(self) -> None:
        """End the streams when what they asked for so far is answered."""
        for reader in self._readers:
            reader.cancel()

    async def answer(
        self,
        requests: AsyncIterable[Request],
        answer: _Answer[Request],
        context: _Context,
        *,
        in_order: bool = False,
    ) -> None:
        """Answer the requests of a stream, several at once, up to the last.

        Args:
            requests: Those of the stream.
            answer: Answers a request within its place, which it holds no longer than it computes.
            context: Of the call, which gets the answers.
            in_order: Whether they are to come in the order of the requests.

        Raises:
            StoppingError: the server stopped before the stream ended.
        """
        stream = _Stream(answer, context, in_order=in_order)
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
        stream: "_Stream[Request]",
        tasks: asyncio.TaskGroup,
    ) -> None:
        async for request in requests:
            images, is_placed = self._images(request), asyncio.Event()
            place = self._place(peer, images, is_placed)
            task = tasks.create_task(stream.serve(request, images, place))
            task.add_done_callback(partial(_set, is_placed))  # refused before it asked for one
            del request, place, task
            await is_placed.wait()
            await stream.has_room(self._pipeline.stream_window)

    @contextlib.asynccontextmanager
    async def _place(self, peer: str, images: int, is_placed: asyncio.Event) -> AsyncIterator[None]:
        async with self._pipeline.places.hold(peer, images, in_turn=True):
            is_placed.set()
            yield


class _Stream(Generic[Request]):
    """One stream: its images in progress, answers that were not taken among them."""

    def __init__(self, answer: _Answer[Request], context: _Context, *, in_order: bool) -> None:
        self._answer = answer
        self._context = context
        self._in_order = in_order
        self._writing = asyncio.Lock()  # gRPC takes one message at a time
        self._last = asyncio.Event()
        """That the answer to the last request is written."""
        self._last.set()
        self._images = 0
        self._changed = asyncio.Event()

    async def has_room(self, images: int) -> None:
        """Return when fewer images are in progress."""
        while self._images >= images:
            self._changed.clear()
            await self._changed.wait()

    async def serve(self, request: Request, images: int, place: Place) -> None:
        """Answer a request of so many images."""
        self._images += images
        previous, self._last = self._last, asyncio.Event()
        is_written = self._last
        answering = self._answer(request, place)
        del request, place
        response = await answering
        if self._in_order:
            await previous.wait()
        async with self._writing:
            await self._context.write(response)
        is_written.set()
        self._images -= images
        self._changed.set()


def _set(event: asyncio.Event, _: object) -> None:
    event.set()
