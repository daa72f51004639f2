"""Main program of a worker process, and its channels to the server.

The worker receives the engine's loader over its control connection. It replies with the engine's
properties and one channel per concurrent batch.

Channels pass arrays through shared memory. A message is pickled, with its arrays in out-of-band
buffers. The sender writes the pickle and the buffers to memory that both processes map, then sends
their sizes through a pipe. The memory has no name, so it is freed when the processes end, and does
not count against /dev/shm.
"""

import contextlib
import gc
import logging
import mmap
import os
import pickle
import select
import sys
import threading
import weakref
from array import array
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, Final, Self

import numpy as np

from ...model.bundle.manifest import BundleError
from ...model.image_limits import ImageError
from ..errors import BackendError, ServingError
from ..host import name_thread
from .base import aligned_layout

_log = logging.getLogger(__name__)

# Interval in seconds at which a thread yields the GIL. With the default of 5 ms, the thread that
# launches GPU kernels can wait while another thread encodes responses. With 0.2 ms, throughput was
# lower on slow CPUs (benchmarks/results/serve-h200-202611.md).
_SWITCH_S: Final = 1e-3

# Size in bytes from which a copy to shared memory releases the GIL. For a smaller copy, waiting for
# the GIL afterwards would take longer than the copy.
_LARGE_BYTES: Final = 1 << 20

# Exceptions that a connection to the server raises after the server's process has ended.
_SERVER_GONE = (EOFError, ConnectionError)


class Channel:
    """One end of a two-way channel between processes.

    Each direction holds one message, which the next message overwrites. `close`, or the deletion of
    the last reference, closes this end.
    """

    def __init__(self, connection: Connection, outgoing: int, incoming: int) -> None:
        """Take ownership of a connection and of two file descriptors of shared memory.

        Args:
            connection: Pipe that carries the sizes of each message's pickle and buffers.
            outgoing: File descriptor of the memory for messages that this end sends.
            incoming: File descriptor of the memory for messages that this end receives.
        """
        self._connection = connection
        self._outgoing = _SharedMemory(outgoing)
        self._incoming = _SharedMemory(incoming)

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Create a channel and return its two ends."""
        here, there = Pipe()
        forth, back = (os.memfd_create("channel", os.MFD_CLOEXEC) for _ in range(2))
        return cls(here, forth, back), cls(there, os.dup(back), os.dup(forth))

    def send_to(self, connection: Connection) -> None:
        """Send this channel end to a process that calls `receive_from`.

        Afterwards, only that process may use the channel end.
        """
        for handle in (
            self._connection.fileno(),
            self._outgoing.handle,
            self._incoming.handle,
        ):
            send_handle(connection, handle, None)

    @classmethod
    def receive_from(cls, connection: Connection) -> Self:
        """Receive one of the two ends of a channel, which another process sends with `send_to`."""
        handle, outgoing, incoming = (recv_handle(connection) for _ in range(3))
        return cls(Connection(handle), outgoing, incoming)

    def send(self, message: object) -> None:
        """Send a picklable object. It overwrites this end's previous message in shared memory.

        Raises:
            OSError: one end of the channel is closed.
        """
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
        parts = [memoryview(data), *(buffer.raw() for buffer in buffers)]
        self._outgoing.write(parts)
        # As an array, because `Connection.send` would pickle a list, which takes longer.
        self._connection.send_bytes(array("Q", [part.nbytes for part in parts]))

    def poll(self, timeout_s: float | None) -> bool:
        """Return True when a message arrives or the other end closes; False after `timeout_s`.

        `timeout_s` is in seconds. None: wait without a limit.
        """
        # Not `Connection.poll`, which builds a selector and takes several times as long.
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))

    def receive(self, *, copy: bool) -> Any:
        """Wait for the next message and return it.

        Args:
            copy: Whether to copy the out-of-band buffers of the message, such as those of arrays.
                False: they are views of the shared memory, which the next message overwrites.

        Raises:
            EOFError: the other end is closed.
        """
        lengths = array("Q", self._connection.recv_bytes())
        data, *buffers = self._incoming.read(lengths)
        return pickle.loads(data, buffers=map(bytearray, buffers) if copy else buffers)

    def close(self) -> None:
        """Close this end of the channel. Idempotent. Arrays received without copying stay valid."""
        self._connection.close()
        self._outgoing.close()
        self._incoming.close()


class _SharedMemory:
    """Unnamed shared memory that two processes map. It grows to the size of the largest message."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self._close_handle = weakref.finalize(self, os.close, handle)
        self._bytes = np.empty(0, np.uint8)

    def write(self, parts: Sequence[memoryview]) -> None:
        starts, size = aligned_layout([part.nbytes for part in parts])
        if size > len(self._bytes):
            os.ftruncate(self.handle, 1 << (size - 1).bit_length())
            self._map()
        for start, part in zip(starts, parts, strict=True):
            target = self._bytes[start : start + part.nbytes]
            if part.nbytes < _LARGE_BYTES:
                target.data[:] = part
            else:
                target[:] = np.asarray(part)  # NumPy releases the GIL while it copies

    def read(self, lengths: Sequence[int]) -> list[memoryview]:
        """Return views of the latest message's pickle and buffers, whose sizes are `lengths`."""
        starts, size = aligned_layout(lengths)
        if size > len(self._bytes):
            self._map()
        return [
            self._bytes[start : start + length].data
            for start, length in zip(starts, lengths, strict=True)
        ]

    def close(self) -> None:
        self._close_handle()
        self.handle = -1
        self._bytes = np.empty(0, np.uint8)

    def _map(self) -> None:
        self._bytes = np.frombuffer(mmap.mmap(self.handle, 0), np.uint8)


def run_worker(control_handle: int) -> None:
    """Load and run an engine, until the server closes the engine or the server's process ends.

    Args:
        control_handle: File descriptor of the control connection to the server's process.
    """
    sys.setswitchinterval(_SWITCH_S)
    with contextlib.suppress(*_SERVER_GONE):
        _run_engine(Connection(control_handle))


def _run_engine(control: Connection) -> None:
    try:
        engine = control.recv().load()
    except Exception as error:
        control.send(_portable_error(error, "loading the engine failed"))
        return
    control.send(engine.info)
    threads = [
        threading.Thread(target=_serve_channel, args=(engine, _open_channel(control)))
        for _ in range(engine.info.concurrency)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.close()


def _open_channel(control: Connection) -> Channel:
    here, there = Channel.pair()
    there.send_to(control)
    return here


def _serve_channel(engine: Any, channel: Channel) -> None:
    """Run the engine methods that the server calls through a channel.

    A call arrives as a tuple (method name, *arguments). The result or the exception is sent back.
    The function returns when None arrives, or when the server's process ends.
    """
    name_thread("batch")
    with contextlib.suppress(*_SERVER_GONE):
        while (call := channel.receive(copy=False)) is not None:
            method, *arguments = call
            try:
                reply = getattr(engine, method)(*arguments)
                if method == "warm_up":
                    freeze_garbage_collector()
            except BaseException as error:  # also SystemExit: the server waits for a reply
                reply = _portable_error(error, "a batch failed")
            channel.send(reply)


def _portable_error(error: BaseException, context: str) -> Exception:
    """Return `error` if the server expects errors of this type.

    Otherwise, log `error` and return a BackendError, which the server can always unpickle. The
    message of the BackendError begins with `context`.
    """
    if isinstance(error, (BundleError, ImageError, ServingError)):
        return error
    _log.error("%s", context, exc_info=error)
    return BackendError(f"{context} with {type(error).__name__}: {error}")


def freeze_garbage_collector() -> None:
    """Exclude all present objects from future garbage collections.

    Call it once a process has loaded its modules and models.
    """
    # Each full collection would scan these objects in vain. In a process with torch that takes
    # 0.1 s or more, during which no other thread runs.
    gc.collect()
    gc.freeze()
    # `cli.main` makes full collections rare. Make them frequent again: from now on they take little
    # time, and they free objects that requests leave behind.
    gc.set_threshold(*gc.get_threshold()[:2], 10)
