"""Limits on the requests and images of each client per second."""

import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Final

from ..errors import RateLimitError

# Client of the current task: a hash of its token, or its host if the server has no tokens.
current_client: Final = ContextVar("current_client", default="")

# Number of clients above which those without recent requests are forgotten.
_MAX_CLIENTS: Final = 10_000


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
        """Set the limits.

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
        balance then becomes negative, which delays the client's next requests.

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
                raise RateLimitError(
                    f"the client has reached the server's {name} ({rate:g}); try again in "
                    f"{missing / rate:.1f} s"
                )
        for name, cost in costs.items():
            balances[name] -= cost

    def _forget(self, now: float) -> None:
        """If there are more than `_MAX_CLIENTS` clients, drop those that have been idle longest.

        Stop at the first client that has, at time `now`, a bucket that is not full: if dropped, it
        would get a full bucket with its next request.
        """
        while len(self._clients) > _MAX_CLIENTS:
            client, (before, balances) = next(iter(self._clients.items()))
            if any(
                balances[name] + rate * (now - before) < max(1.0, rate)
                for name, rate in self._rates.items()
            ):
                return
            del self._clients[client]
