"""A server of a bundle in a process of its own."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple


class ServerStartError(Exception):
    """The server ended before it was ready; its own message is on the error stream."""


class ServerProcess(NamedTuple):
    """A server that is ready."""

    address: str
    """`host:port`."""
    pid: int


@contextmanager
def running_server(bundle: Path, *options: str) -> Iterator[ServerProcess]:
    """Serve a bundle on a free port for as long as the context lasts.

    Args:
        bundle: Folder that export wrote.
        options: Further words for `maskrcnn serve`.

    Raises:
        ServerStartError: it is not going to be ready.
    """
    command = [sys.executable, "-m", "maskrcnn_trt", "serve", str(bundle), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            ready = re.search(r"\S+:\d+", process.stdout.readline())
            if ready is None:
                raise ServerStartError(f"the server of {bundle} did not start")
            yield ServerProcess(ready[0], process.pid)
        finally:
            process.terminate()
