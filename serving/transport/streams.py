"""Streams of requests: read no faster than there are places, and ended when the server stops."""

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Generic, TypeVar

from ..errors import QueueFullError, StoppingError
from ..pipeline import Pipeline

Request = TypeVar("Request")

Place = AbstractContextManager[Any]
"""What an answer is to be made within; where there was no room to wait for a place, it refuses."""


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

    @contextlib.asynccontextmanager
    async def reading(
        self,
        requests: AsyncIterable[Request],
        peer: str,
        answer: Callable[[Request, Place], Coroutine[Any, Any, Any]],
        begun: Callable[[asyncio.Task[Any] | None], None] = lambda _: None,
    ) -> AsyncIterator[asyncio.Semaphore]:
        """Answer the requests of a stream, several at once; the context ends with the last.

        Args:
            requests: Those of the stream.
            peer: The connection that they come by.
            answer: Answers a request within its place, which it holds no longer than it computes.
            begun: Gets the task of each answer in the order of the requests, and none at the end.

        Yields:
            What is to be released when an answer was taken, for another request to be read.

        Raises:
            StoppingError: the server stopped before the stream ended.
        """
        window = asyncio.Semaphore(self._pipeline.stream_window)
        async with asyncio.TaskGroup() as tasks:

            async def read() -> None:
                try:
                    await window.acquire()
                    async for request in requests:
                        place = await self._place_for(request, peer)
                        task = tasks.create_task(answer(request, place))
                        if isinstance(place, contextlib.ExitStack):
                            # A task that is cancelled before it begins does not enter its place.
                            task.add_done_callback(partial(_close, place))
                        begun(task)
                        del request, place, task
                        await window.acquire()
                finally:
                    begun(None)

            reader = tasks.create_task(read())
            self._readers.add(reader)
            reader.add_done_callback(self._readers.discard)
            yield window
        if reader.cancelled():
            raise StoppingError("the server is stopping")

    async def _place_for(self, request: Request, peer: str) -> Place:
        places, number = self._pipeline.places, self._images(request)
        try:
            return await places.wait(peer, number)
        except QueueFullError:
            return places.hold(peer, number)


def _close(held: contextlib.ExitStack, _: asyncio.Task[Any]) -> None:
    held.close()
