"""Deadlines of requests, and time limits of work such as loading a model."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

from ..errors import ExpiredError


def request_deadline(
    timeout_s: float | None, server_timeout_s: float | None
) -> AbstractAsyncContextManager[None]:
    """Return a context manager that cancels its body at a request's deadline.

    The time counts from the start of the body.

    Args:
        timeout_s: Time limit in the request, in seconds. None: the request has no limit of its own.
        server_timeout_s: Time limit of the server in seconds. None: the server has no limit. If
            both limits are given, the lower one applies.

    Raises:
        ExpiredError: when the context exits, because its body took longer than the limit.
    """
    limits = [s for s in (timeout_s, server_timeout_s) if s is not None]
    if not limits:
        return contextlib.nullcontext()
    limit_s = min(limits)
    return time_limit(
        limit_s,
        lambda: ExpiredError(
            f"the request exceeded its time limit of {limit_s:g} s; raise timeout_us (or the "
            "parameter timeout) in the request, raise the server's --timeout-s, or send fewer "
            "images at once"
        ),
    )


@contextlib.asynccontextmanager
async def time_limit(limit_s: float, timeout_error: Callable[[], Exception]) -> AsyncIterator[None]:
    """Cancel the body of the context if it takes longer than a limit.

    Args:
        limit_s: Time limit in seconds.
        timeout_error: Function that returns the exception to raise if the limit is exceeded.
    """
    try:
        async with asyncio.timeout(limit_s) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise timeout_error() from None
