"""Scheduling options of a request, such as precision, priority and time limit."""

import math
from dataclasses import dataclass

from .errors import InvalidRequestError

# Priority levels, the most urgent first.
PRIORITIES = (1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions:
    """Scheduling options of a request: model, precision, priority, time limit and connection.

    Raises:
        InvalidRequestError: the priority or the timeout is out of range.
    """

    # One of the served precisions. None: the first of them, which is the default.
    precision: str | None = None
    # One of `PRIORITIES`.
    priority: int = 2
    # Time limit of the request in seconds. None: the server's own limit.
    timeout_s: float | None = None
    # gRPC peer of the request; it identifies the client's connection.
    peer: str = ""
    # Model name in the request. Empty: the server's first model.
    model: str = ""

    def __post_init__(self) -> None:
        if self.priority not in PRIORITIES:
            raise InvalidRequestError(
                f"priority is {self.priority}; it must be one of "
                f"{', '.join(map(str, PRIORITIES))}, where 1 is the most urgent"
            )
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise InvalidRequestError(
                f"the timeout is {self.timeout_s} s; it must be above 0 and finite"
            )


DEFAULT_SCHEDULING = SchedulingOptions()
