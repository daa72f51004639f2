"""Resources that all models of a server share: threads, decode memory, limits per client."""

import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Final

from ...model.host_resources import memory_limit
from ...model.image_limits import ImageError
from ..config import ServeConfig
from ..errors import QueueFullError, RateLimitError
from ..monitoring.telemetry import Telemetry
from .scheduling import FairSemaphore, FairThreadPool, Reservation

# Maximum number of open gRPC calls per admission slot. This limits the responses that are held in
# memory for slow clients.
_CALLS_PER_SLOT = 8

# A connection may have this many open calls for each further call that the server can accept; see
# `OpenCalls`.
_CALLS_PER_FREE_CALL = 8

# Client whose call the current task handles, as named by `AccessPolicy.check`: a hash of the
# client's token, or the client's host.
current_client: Final = ContextVar("current_client", default="")

# If `RateLimits` stores more clients than this, it drops those without recent requests.
_MAX_CLIENTS: Final = 10_000

# The default budget for decoding images is `memory_limit()` divided by this number. Messages, model
# and workers need the rest.
_PARTS_OF_LIMIT = 4
# The budget divided by this number is the memory that is set aside for small images.
_PARTS_OF_BUDGET = 4


class SharedResources:
    """Resources that a server's models share: threads, decode memory, client limits, telemetry."""

    def __init__(self, config: ServeConfig, telemetry: Telemetry, models: int) -> None:
        self.telemetry = telemetry
        self.rate_limits = RateLimits(config.max_requests_per_s, config.max_images_per_s)
        # A call is open until its responses have been sent.
        self.open_calls = OpenCalls(_CALLS_PER_SLOT * config.queue_size * models)
        # Threads that decode images and encode responses.
        self.threads = FairThreadPool(config.threads)
        # Memory budget for decoding images.
        self.decode_memory = DecodeMemory(decode_memory_limit(config), config.threads)


class OpenCalls:
    """Counter of the open calls (gRPC calls and HTTP requests) of each connection, with a limit.

    The server accepts at most `limit` open calls in total. If it can accept F more calls, each
    connection may have up to 8 * F open calls (dynamic thresholds; Choudhury and Hahne, 1998). A
    single connection can thus have about 8/9 of `limit` open calls, and two connections about 8/17
    each. A call that exceeds the total or the connection's limit is rejected immediately. It does
    not wait, because calls can stay open for hours.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._total = 0
        self._open = Counter[str]()

    def add(self, peer: str) -> None:
        """Count a call as open until `remove` is called.

        Args:
            peer: gRPC peer of the call; it identifies the client's connection.

        Raises:
            QueueFullError: the server or the connection has too many open calls.
        """
        own, free = self._open[peer], self._limit - self._total - 1
        excess = None
        if free < 0:
            excess = f"the server has {self._total} open calls, the maximum"
        elif own > _CALLS_PER_FREE_CALL * free:
            excess = f"this connection has {own} open calls, its share of at most {self._limit}"
        if excess is not None:
            raise QueueFullError(f"{excess}; try again later, or raise the server's --queue-size")
        self._total += 1
        self._open[peer] += 1

    def remove(self, peer: str) -> None:
        """Stop counting a call that has ended."""
        self._total -= 1
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]


class RateLimits:
    """Two token buckets per client: one for requests, one for images.

    The capacity of a bucket is the number of tokens that it gains per second, but at least 1.
    """

    def __init__(
        self,
        requests_per_s: float | None,
        images_per_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set the rate limits of each client.

        Args:
            requests_per_s: Maximum number of requests of one client per second. None: no limit.
            images_per_s: Maximum number of images of one client per second. None: no limit.
            clock: Function that returns the current time in seconds.
        """
        self._rates = {
            setting: rate
            for setting, rate in (
                ("max_requests_per_s", requests_per_s),
                ("max_images_per_s", images_per_s),
            )
            if rate is not None
        }
        self._clock = clock
        # By client: the time of its latest request, and the balance of each bucket after it.
        self._clients: dict[str, tuple[float, dict[str, float]]] = {}

    def charge(self, images: int) -> None:
        """Take the tokens of one request with `images` images from the client's buckets.

        The client is the value of the context variable `current_client`. A request with more images
        than the capacity of the image bucket is accepted if this bucket is full. The bucket's
        balance then becomes negative, so the client's next requests are rejected for longer.

        Raises:
            RateLimitError: the client has exceeded its limit of requests or images per second.
        """
        if not self._rates:
            return
        client, now = current_client.get(), self._clock()
        full = {name: max(1.0, rate) for name, rate in self._rates.items()}
        before, balances = self._clients.pop(client, (now, full))
        balances = {
            name: min(full[name], balances[name] + rate * (now - before))
            for name, rate in self._rates.items()
        }
        self._clients[client] = now, balances
        self._forget(now)
        costs = {name: 1 if name == "max_requests_per_s" else images for name in balances}
        for name, rate in self._rates.items():
            missing = min(costs[name], full[name]) - balances[name]
            if missing > 0:
                pause_s = math.ceil(10 * missing / rate) / 10  # rounded up, as it must not be 0
                raise RateLimitError(
                    f"the client has reached the server's {name} ({rate:g}); try again in "
                    f"{pause_s} s"
                )
        for name, cost in costs.items():
            balances[name] -= cost

    def _forget(self, now: float) -> None:
        """Drop the token buckets of idle clients until at most `_MAX_CLIENTS` clients are left.

        The client that has been idle longest is dropped first. Stop at the first client whose
        buckets are not full at time `now`. If a dropped client returns, it begins with full
        buckets.
        """
        while len(self._clients) > _MAX_CLIENTS:
            client, (before, balances) = next(iter(self._clients.items()))
            if any(
                balances[name] + rate * (now - before) < max(1.0, rate)
                for name, rate in self._rates.items()
            ):
                return
            del self._clients[client]


class DecodeMemory:
    """Budget of host memory for decoding images.

    A quarter of the budget is set aside for small images: `small` bytes for each thread of the
    server's thread pool. If such a thread decodes an image in at most `small` bytes, the image
    reserves nothing. Larger images, and all images that a worker process decodes on the CPU,
    reserve memory from the remaining three quarters, and wait if too little is free. Connections
    get memory in round-robin order; see `FairSemaphore`.

    Call the methods from one event loop only.
    """

    def __init__(self, limit: int, threads: int) -> None:
        # Size of the budget in bytes.
        self.limit = limit
        # Images that need at most this many bytes are small. If a thread of this process decodes
        # them, they reserve nothing.
        self.small = limit // (_PARTS_OF_BUDGET * threads)
        # Most memory in bytes that one image can reserve.
        self.largest = limit - threads * self.small
        self._bytes = FairSemaphore(self.largest)

    @property
    def reserved(self) -> int:
        """Number of reserved bytes."""
        return self._bytes.in_use

    async def acquire(self, peer: str, size: int) -> Reservation:
        """Reserve memory. If too little memory is free, wait for it.

        The memory stays reserved until the caller and all other holders have dropped the
        `Reservation`.

        Args:
            peer: gRPC peer of the request; it identifies the client's connection.
            size: Number of bytes.

        Raises:
            ImageError: `size` exceeds `self.largest`, the most bytes that an image can reserve.
        """
        if size > self.largest:
            raise ImageError(
                f"decoding the image takes {size >> 20} MiB of memory, but the server allows "
                f"{self.largest >> 20} MiB per image, a part of its decode_memory_mb "
                f"({self.limit >> 20}); send a smaller image, or raise decode_memory_mb"
            )
        await self._bytes.acquire(peer, size)
        return Reservation(partial(self._bytes.release, size))

    @asynccontextmanager
    async def reserve(self, peer: str, size: int) -> AsyncIterator[Reservation]:
        """Reserve memory as `acquire` does, and drop the reservation at the end of the block."""
        reservation = await self.acquire(peer, size)
        try:
            yield reservation
        finally:
            reservation.drop()

    def reserve_in_thread(
        self, peer: str, size: int
    ) -> AbstractAsyncContextManager[Reservation | None]:
        """Reserve memory within the `with` block, for an image that a `FairThreadPool` processes.

        If `size` is at most `self.small`, nothing is reserved, and the context manager yields None:
        `self.small` bytes are set aside for each thread. The arguments and errors are the same as
        in `reserve`.
        """
        return self.reserve(peer, size) if size > self.small else nullcontext()


def decode_memory_limit(config: ServeConfig) -> int:
    """Return the server's budget of host memory for decoding images, in bytes."""
    if config.decode_memory_mb is None:
        return memory_limit() // _PARTS_OF_LIMIT
    return config.decode_memory_mb << 20
