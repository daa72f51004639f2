"""What TensorRT and TensorRT-RTX say, handed to whoever listens at the time."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

Listener = Callable[[str, str], None]
"""Gets a message's severity, as `ERROR`, and its text; called from any thread."""

ERRORS = frozenset({"ERROR", "INTERNAL_ERROR"})
"""Severities of what went wrong."""


class _Listeners:
    """Those who listen to one module."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: tuple[Listener, ...] = ()

    def tell(self, severity: str, message: str) -> None:
        for listener in self._listeners:
            listener(severity, message)

    def add(self, listener: Listener) -> None:
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def remove(self, listener: Listener) -> None:
        with self._lock:
            self._listeners = tuple(other for other in self._listeners if other is not listener)


@cache
def shared_logger(trt: Any) -> Any:
    """The `ILogger` of all builders, parsers and runtimes of a process.

    TensorRT keeps a pointer to one logger alone, the first it is given, whichever an object was
    made with; so this one is never freed.

    Args:
        trt: the module `tensorrt` or `tensorrt_rtx`.
    """
    listeners = _listeners_of(trt)

    class Logger(trt.ILogger):  # type: ignore[misc]
        def log(self, severity: Any, message: str) -> None:
            listeners.tell(severity.name, message)

    return Logger()


@contextmanager
def messages_to(trt: Any, listener: Listener) -> Iterator[None]:
    """Have a listener hear everything that TensorRT says in the meantime, in all threads.

    Args:
        trt: the module `tensorrt` or `tensorrt_rtx`.
        listener: gets the messages of all objects made with the `shared_logger`.
    """
    listeners = _listeners_of(trt)
    listeners.add(listener)
    try:
        yield
    finally:
        listeners.remove(listener)


@contextmanager
def errors_of(trt: Any) -> Iterator[list[str]]:
    """Take down the errors that TensorRT logs in the meantime, in all threads.

    Args:
        trt: the module `tensorrt` or `tensorrt_rtx`.

    Yields:
        The list to which they are added, as they come.
    """
    errors: list[str] = []

    def note(severity: str, message: str) -> None:
        if severity in ERRORS:
            errors.append(message)

    with messages_to(trt, note):
        yield errors


def listen(trt: Any, listener: Listener) -> None:
    """Have a listener hear everything that TensorRT says from now on.

    Args:
        trt: the module `tensorrt` or `tensorrt_rtx`.
        listener: gets the messages of all objects made with the `shared_logger`.
    """
    _listeners_of(trt).add(listener)


@cache
def _listeners_of(trt: Any) -> _Listeners:
    return _Listeners()
