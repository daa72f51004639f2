"""A proxy between a client and a server that counts what passes, and can go silent."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Proxy:
    """Passes bytes on; once silent it only takes them."""

    def __init__(self, target: str) -> None:
        self.address = ""
        self.silent = False
        self.sent = 0
        """Bytes that clients sent."""
        self.connections = 0
        self._host, _, self._port = target.rpartition(":")

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        other_reader, other_writer = await asyncio.open_connection(self._host, int(self._port))
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass_on(reader, other_writer, counted=True))
                tasks.create_task(self._pass_on(other_reader, writer, counted=False))
        finally:
            for end in (writer, other_writer):
                end.transport.abort()
            await asyncio.sleep(0)  # in which they are closed

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counted: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                self.sent += counted * len(data)
                if not self.silent:
                    writer.write(data)
                    await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def proxied(target: str) -> AsyncIterator[Proxy]:
    """A proxy before the server at an address."""
    proxy = Proxy(target)
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(proxy.connect(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    proxy.address = "{}:{}".format(*server.sockets[0].getsockname())
    try:
        yield proxy
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
