"""How requests are refused."""

import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

import grpc

from ..statuses import shortened, status_from_error

_log = logging.getLogger(__name__)

T = TypeVar("T")


async def refusing(answer: Awaitable[T], context: grpc.aio.ServicerContext[Any, Any]) -> T:
    """The answer to a call, which ends with a status if there is none."""
    try:
        return await answer
    except Exception as error:
        await context.abort(*refusal_from_error(error))


def refusal_from_error(error: Exception) -> tuple[grpc.StatusCode, str]:
    """How a request is refused that raised; what is the server's own fault is logged.

    The error is of no use after: where it was raised, nothing is held any more.
    """
    status, message = status_from_error(error), str(error)
    if status is grpc.StatusCode.INTERNAL:
        _log.error("a request failed", exc_info=error)
        message = "the server failed on this request; its log says why"
    _release_frames(error)
    return status, shortened(message)


def _release_frames(error: Exception) -> None:
    """Let an error hold no image, since gRPC keeps it in a cycle until the next collection."""
    pending: list[BaseException | None] = [error]
    released: set[int] = set()
    while pending:
        raised = pending.pop()
        if raised is None or id(raised) in released:
            continue
        released.add(id(raised))
        raised.__traceback__ = None
        pending += raised.__cause__, raised.__context__
        if isinstance(raised, BaseExceptionGroup):
            pending += raised.exceptions
