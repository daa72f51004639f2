"""TCP proxy that counts the bytes that clients send, and can stop forwarding."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator


class Proxy:
    """TCP proxy. While `silent` is set, it reads but does not forward."""

    def __init__(self, target: str) -> None:
        self.silent = False
        # Number of bytes that clients sent.
        self.sent = 0
        self.connections = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.address = "{}:{}".format(*self.listener.getsockname())
        self._host, _, self._port = target.rpartition(":")
        self._tasks: set[asyncio.Task[None]] = set()
        self._sockets = contextlib.ExitStack()

    def accept(self) -> None:
        # Connect to the server synchronously, so that `close` closes every accepted connection.
        client = self._sockets.enter_context(self.listener.accept()[0])
        server = self._sockets.enter_context(
            socket.create_connection((self._host, int(self._port)))
        )
        for end in (client, server):
            end.setblocking(False)
        self.connections += 1
        for pair in ((client, server), (server, client)):
            self._tasks.add(asyncio.create_task(self._forward(*pair, counted=pair[0] is client)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._sockets.close()

    async def _forward(
        self, reader: socket.socket, writer: socket.socket, *, counted: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while data := await loop.sock_recv(reader, 1 << 16):
                self.sent += counted * len(data)
                if not self.silent:
                    await loop.sock_sendall(writer, data)
        with contextlib.suppress(OSError):
            writer.shutdown(socket.SHUT_WR)


@contextlib.asynccontextmanager
async def proxied(target: str) -> AsyncIterator[Proxy]:
    """Run a proxy in front of the server at an address."""
    proxy, loop = Proxy(target), asyncio.get_running_loop()
    with proxy.listener:
        loop.add_reader(proxy.listener, proxy.accept)
        try:
            yield proxy
        finally:
            loop.remove_reader(proxy.listener)
            await proxy.close()
