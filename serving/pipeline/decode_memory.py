"""Budget of host memory for decoding images, shared by all threads and connections."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from ...model.host_resources import memory_limit
from ...model.image_limits import ImageError
from ..config import ServeConfig

# The default budget is the memory limit divided by this number. Messages, model and workers need
# the rest.
_PARTS_OF_LIMIT = 4
# The budget divided by this number is set aside for small images.
_PARTS_OF_BUDGET = 4


class DecodeMemory:
    """Budget of host memory for decoding images.

    A quarter of the budget is set aside: an equal part, `small` bytes, for each thread. Images that
    need at most `small` bytes use their thread's part and never wait for memory. Larger images
    reserve memory from the remaining three quarters and wait if too little is free. Connections get
    memory in round-robin order. If the next image in this order does not fit, the images behind it
    wait too, so large images are not delayed forever.

    Call the methods from one event loop only.
    """

    def __init__(self, limit: int, threads: int) -> None:
        # Size of the budget in bytes.
        self.limit = limit
        # Images that need at most this many bytes are small. They reserve nothing.
        self.small = limit // (_PARTS_OF_BUDGET * threads)
        # Most memory in bytes that one image can reserve.
        self.largest = limit - threads * self.small
        # Reserved bytes.
        self.reserved = 0
        # Waiting reservations by connection, in round-robin order.
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    @asynccontextmanager
    async def reserve(self, peer: str, size: int) -> AsyncIterator[None]:
        """Reserve memory within the `with` block. If too little memory is free, wait for it.

        Args:
            peer: gRPC peer of the request; it identifies the client's connection.
            size: Number of bytes.

        Raises:
            ImageError: `size` exceeds `self.largest`, the most bytes that an image can reserve.
        """
        if size > self.largest:
            raise ImageError(
                f"decoding the image takes {size >> 20} MiB of memory, but the server allows "
                f"{self.largest >> 20} MiB per image; send a smaller image, or raise the server's "
                f"decode_memory_mb ({self.limit >> 20})"
            )
        await self._acquire(peer, size)
        try:
            yield
        finally:
            self._release(size)

    def reserve_in_thread(self, peer: str, size: int) -> AbstractAsyncContextManager[None]:
        """Reserve memory within the `with` block, for an image that a `FairThreadPool` processes.

        If `size` is at most `self.small`, nothing is reserved, because this many bytes are set
        aside for each thread. The arguments and errors are the same as in `reserve`.
        """
        return self.reserve(peer, size) if size > self.small else nullcontext()

    async def _acquire(self, peer: str, size: int) -> None:
        if not self._waiting and self.reserved + size <= self.largest:
            self.reserved += size
            return
        acquired = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(peer, deque()).append((size, acquired))
        try:
            await acquired
        except asyncio.CancelledError:
            if acquired.cancelled():
                self._admit()  # the reservations behind it may fit
            else:  # got the memory and was cancelled in one loop iteration
                self._release(size)
            raise

    def _release(self, size: int) -> None:
        self.reserved -= size
        self._admit()

    def _admit(self) -> None:
        """Give memory to waiting images until too little is free for the next one."""
        while self._waiting:
            peer = next(iter(self._waiting))
            size, acquired = self._waiting[peer][0]
            is_cancelled = acquired.cancelled()
            if not is_cancelled and self.reserved + size > self.largest:
                return
            queue = self._waiting.pop(peer)
            queue.popleft()
            if queue and is_cancelled:
                self._waiting = {peer: queue, **self._waiting}
            elif queue:
                self._waiting[peer] = queue  # behind the other connections
            if not is_cancelled:
                self.reserved += size
                acquired.set_result(None)


def decode_memory_limit(config: ServeConfig) -> int:
    """Return the server's budget of host memory for decoding images, in bytes."""
    if config.decode_memory_mb is None:
        return memory_limit() // _PARTS_OF_LIMIT
    return config.decode_memory_mb << 20
