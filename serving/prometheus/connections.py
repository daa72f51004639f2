"""Prometheus collector of open connections."""

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..host import child_process_ids

# States in /proc/net/tcp.
_ESTABLISHED: Final = "01"
_LISTEN: Final = "0A"

_SOCKET = re.compile(r"socket:\[(\d+)\]")


class _Socket(NamedTuple):
    port: int
    state: str


class ConnectionCollector(Collector):
    """Collector of the open TCP connections of the server and its front ends, by listening port."""

    # Read from the kernel's tables, because gRPC does not report its connections to Python.

    def collect(self) -> Iterator[Metric]:
        """Yield the current number of connections of each listening port."""
        sockets = list(_own_sockets())
        established = Counter(socket.port for socket in sockets if socket.state == _ESTABLISHED)
        family = GaugeMetricFamily(
            "maskrcnn_connections", "Open connections by port of the server.", labels=("port",)
        )
        for port in sorted({socket.port for socket in sockets if socket.state == _LISTEN}):
            family.add_metric((str(port),), established[port])
        yield family


def _own_sockets() -> Iterator[_Socket]:
    """Yield the TCP sockets of this process and its children: local port, /proc/net/tcp state."""
    processes = os.getpid(), *child_process_ids()
    inodes = {inode for process in processes for inode in _socket_inodes(process)}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
                if inode in inodes:
                    yield _Socket(int(local.rpartition(":")[2], 16), state)


def _socket_inodes(process: int) -> Iterator[str]:
    folder = Path("/proc", str(process), "fd")
    with contextlib.suppress(FileNotFoundError):  # the process has ended
        for descriptor in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):  # closed since the folder was listed
                if match := _SOCKET.fullmatch(os.readlink(folder / descriptor)):
                    yield match[1]
