"""Processes without a free file descriptor."""

import contextlib
import os
import resource
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def no_free_files() -> Iterator[None]:
    """Prevent this process from opening files and sockets within the context."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def connected_without_free_files(host: str, port: int, count: int = 3) -> Iterator[None]:
    """Open `count` connections to a port of this process.

    Within the context, the process has no free file descriptor with which to accept them.
    """
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(count)]
        stack.enter_context(no_free_files())
        for client in clients:
            client.connect((host, port))
        yield
