"""Exit with clean-up on signals that would otherwise end the process immediately."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any


@contextlib.contextmanager
def exit_on_signals() -> Iterator[Callable[[], None]]:
    """Context manager: make SIGTERM and SIGHUP raise SystemExit, so that `finally` blocks run.

    The exit status is 128 + signal number. After the first signal, further signals are ignored.
    If a signal is already ignored, as under `nohup`, or already has a handler, neither this context
    manager nor the yielded function changes it. Outside of the main thread, do nothing.

    Yields:
        Function that makes the process ignore SIGTERM and SIGHUP, for example during clean-up.
    """
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if is_main and signal.getsignal(number) == signal.SIG_DFL
    ]

    def handle_with(handler: Any) -> None:
        for number in numbers:
            signal.signal(number, handler)

    is_exiting = False

    def exit_process(number: int, _: object) -> None:
        nonlocal is_exiting
        if is_exiting:  # a second signal arrived before it was ignored
            return
        is_exiting = True
        handle_with(signal.SIG_IGN)  # `timeout` and shells repeat a signal
        sys.exit(128 + number)

    handle_with(exit_process)
    try:
        yield partial(handle_with, signal.SIG_IGN)
    finally:
        if not is_exiting:
            handle_with(signal.SIG_DFL)
