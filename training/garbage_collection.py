"""Suspend or force Python's garbage collection of reference cycles."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Suspend garbage collection for a block that creates millions of objects and keeps them."""
    # The collector would traverse all these objects repeatedly, and free none.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def collect_frozen_objects() -> None:
    """Free unreachable objects, including those that `CocoDataset` froze with `gc.freeze`.

    Afterwards, freeze all remaining objects, so that later collections skip them.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
