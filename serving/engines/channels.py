"""Lines between two processes of this machine, over which arrays go by shared memory.

A message lies in memory that both processes map; a connection says when it is there and how it is
laid out. The memory has no name: it goes with the processes, however they end, and counts against
no limit of /dev/shm.
"""

import mmap
import os
import pickle
import weakref
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, Self

import numpy as np

_ALIGNMENT = 64
"""Of the parts of a message, in bytes: a cache line."""


class Channel:
    """An end of a line, over which one message goes at a time, in one direction or the other.

    It is closed with the last reference to it, if not before.
    """

    def __init__(self, connection: Connection, outgoing: int, incoming: int) -> None:
        """Take over the handles of a connection and of the memory of each direction."""
        self._connection = connection
        self._outgoing = _Memory(outgoing)
        self._incoming = _Memory(incoming)

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """The ends of a new line."""
        here, there = Pipe()
        forth, back = (os.memfd_create("channel", os.MFD_CLOEXEC) for _ in range(2))
        return cls(here, forth, back), cls(there, os.dup(back), os.dup(forth))

    def give(self, connection: Connection) -> None:
        """Hand this end to the process at the other end of a connection, which `take`s it.

        It is not used here after.
        """
        for handle in (
            self._connection.fileno(),
            self._outgoing.handle,
            self._incoming.handle,
        ):
            send_handle(connection, handle, None)

    @classmethod
    def take(cls, connection: Connection) -> Self:
        """The end that comes over a connection."""
        handle, outgoing, incoming = (recv_handle(connection) for _ in range(3))
        return cls(Connection(handle), outgoing, incoming)

    def send(self, message: object) -> None:
        """Send what can be pickled; the memory of the message before is overwritten.

        Raises:
            OSError: this end or the other is closed.
        """
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append)
        parts = [memoryview(data), *(buffer.raw() for buffer in buffers)]
        self._outgoing.write(parts)
        self._connection.send([part.nbytes for part in parts])

    def poll(self, timeout_s: float | None) -> bool:
        """Whether a message or the end comes within some time."""
        return self._connection.poll(timeout_s)

    def receive(self, *, copy: bool) -> Any:
        """The next message.

        Args:
            copy: Without it the message's arrays change when the other end sends again.

        Raises:
            EOFError: the other end is closed.
        """
        data, *buffers = self._incoming.read(self._connection.recv())
        return pickle.loads(data, buffers=map(bytearray, buffers) if copy else buffers)

    def close(self) -> None:
        """Close this end, if it is not; arrays that were received without copying stay."""
        self._connection.close()
        self._outgoing.close()
        self._incoming.close()


class _Memory:
    """Memory that two processes map, which grows with what is written into it."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self._close_handle = weakref.finalize(self, os.close, handle)
        self._bytes = np.empty(0, np.uint8)

    def write(self, parts: Sequence[memoryview]) -> None:
        """Lay parts one after another."""
        starts, size = _layout([part.nbytes for part in parts])
        if size > len(self._bytes):
            os.ftruncate(self.handle, 1 << (size - 1).bit_length())
            self._map()
        for start, part in zip(starts, parts, strict=True):
            # NumPy lets other threads run while it copies.
            self._bytes[start : start + part.nbytes] = np.asarray(part)

    def read(self, lengths: Sequence[int]) -> list[memoryview]:
        """The parts of these lengths in bytes, where they lie."""
        starts, size = _layout(lengths)
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


def _layout(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where parts of these lengths start, and where the last one ends."""
    starts, end = [], 0
    for length in lengths:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + length
    return starts, end
