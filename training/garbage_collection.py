"""Suspension of Python's search for cycles of objects."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Suspend garbage collection while millions of objects are made that all stay in use.

    The collector would look at all of them again and again, and find nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
