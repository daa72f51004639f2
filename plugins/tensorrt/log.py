"""Log messages of TensorRT and TensorRT-RTX, forwarded to registered listeners."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

# Function that is called, from any thread, with a message's severity (such as `ERROR`) and text.
Listener = Callable[[str, str], None]

# Severities that are errors.
ERRORS = frozenset({"ERROR", "INTERNAL_ERROR"})


@cache
def shared_logger(trt: Any) -> Any:
    """Return the `ILogger` shared by all builders, parsers and runtimes of a process.

    Args:
        trt: the module `tensorrt` or `tensorrt_rtx`.
    """
    # TensorRT keeps a pointer to the first logger it receives and uses it for all objects. The
    # cache keeps that logger alive.
    listeners = _listeners_of(trt)

    class Logger(trt.ILogger):  # type: ignore[misc]
        def log(self, severity: Any, message: str) -> None:
            # The copy, `append` and `remove` are atomic, so threads need no lock.
            for listener in tuple(listeners):
                listener(severity.name, message)

    return Logger()


@contextmanager
def messages_to(trt: Any, listener: Listener) -> Iterator[None]:
    """While the `with` block runs, forward TensorRT's messages from all threads to a listener.

    The messages are those of all objects that use `shared_logger`.

    Args:
        trt: the module `tensorrt` or `tensorrt_rtx`.
        listener: function that is called with each message's severity, such as `ERROR`, and text.
    """
    listeners = _listeners_of(trt)
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)


@contextmanager
def errors_of(trt: Any) -> Iterator[list[str]]:
    """While the `with` block runs, collect the errors that TensorRT logs in any thread.

    Args:
        trt: the module `tensorrt` or `tensorrt_rtx`.

    Yields:
        List to which the text of each error is appended.
    """
    errors: list[str] = []

    def collect(severity: str, message: str) -> None:
        if severity in ERRORS:
            errors.append(message)

    with messages_to(trt, collect):
        yield errors


def add_listener(trt: Any, listener: Listener) -> None:
    """Forward TensorRT's messages to a listener until the process ends.

    The messages are those of all objects that use `shared_logger`.

    Args:
        trt: the module `tensorrt` or `tensorrt_rtx`.
        listener: function that is called with each message's severity, such as `ERROR`, and text.
    """
    _listeners_of(trt).append(listener)


@cache
def _listeners_of(trt: Any) -> list[Listener]:
    return []
