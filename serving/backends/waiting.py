"""Waiting for a device."""

import time
from collections.abc import Callable

_PERIOD_S = 1e-4


def wait_until(is_done: Callable[[], bool]) -> None:
    """Return soon after an event of the device has come, and ask for it now and then meanwhile.

    CUDA's own ways are worse here: to spin takes a core from decoding and encoding, and to sleep
    until an interrupt took ten milliseconds on a virtual machine.
    """
    while not is_done():
        time.sleep(_PERIOD_S)
