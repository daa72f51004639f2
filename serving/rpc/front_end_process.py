"""Main program of a front-end process, which passes all gRPC calls to the server's process."""

import asyncio
import itertools
import logging
import pickle
import socket
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc

from ..grpc_status import drop_client_faults, wait_for_stop
from .front_end_link import Frame, Link

if TYPE_CHECKING:
    from .certificates import CertificateFiles  # slow to import, and not needed without TLS

_log = logging.getLogger(__name__)

# Status codes by number.
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


def run_front_end(
    handle: int,
    address: str,
    options: Sequence[tuple[str, int]],
    uses_tls: bool,
) -> None:
    """Accept calls and pass them to the server's process.

    Calls are accepted until the server's process ends, or sends a frame of kind `Frame.STOP`.

    Args:
        handle: File descriptor of the Unix socket to the server's process.
        address: Address to listen on, as `host:port`.
        options: Options of the gRPC server.
        uses_tls: Whether connections are encrypted. If so, the server's process sends the
            certificate files in a frame of kind `Frame.CERTIFICATE`.
    """
    drop_client_faults()
    asyncio.run(_serve(handle, address, options, uses_tls))


async def _serve(
    handle: int,
    address: str,
    options: Sequence[tuple[str, int]],
    uses_tls: bool,
) -> None:
    server = grpc.aio.server(options=options)
    # gRPC applies max_pending_requests only to calls that it has not passed to Python yet. The
    # forwarder therefore applies the same limit to the calls that wait for the server's process.
    forwarder = _CallForwarder(server, dict(options)["grpc.server.max_pending_requests"])
    link = await forwarder.connect(socket.socket(fileno=handle))
    server.add_generic_rpc_handlers([forwarder])
    try:
        if uses_tls:
            server.add_secure_port(address, await forwarder.credentials())
        else:
            server.add_insecure_port(address)
    except RuntimeError:
        _log.error(
            "the front-end process cannot listen on %s; choose an address of this machine and a "
            "free port",
            address,
        )
        sys.exit(1)
    await server.start()
    link.send(Frame.READY)
    await wait_for_stop(server)
    link.close()
    await link.closed


class _CallForwarder(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in stubs only
    """Handler of all gRPC methods. It passes the calls to the server's process."""

    def __init__(self, server: grpc.aio.Server, max_pending_calls: int) -> None:
        self._server = server
        self._link: Link
        self._numbers = itertools.count()
        # By call number: frames (kind and payload) from the server's process, not processed yet.
        self._frames: dict[int, asyncio.Queue[tuple[int, bytes]]] = {}
        # Limits the number of calls that wait for their first frame from the server's process.
        self._pending = asyncio.Semaphore(max_pending_calls)
        # Latest certificate files from the server's process.
        self._certificate: CertificateFiles
        self._has_certificate = asyncio.Event()
        # Tasks that stop the gRPC server.
        self._stopping: list[asyncio.Task[None]] = []

    async def connect(self, connection: socket.socket) -> Link:
        """Create and return the `Link` over which calls are passed to the server's process.

        `connection` is this process's end of the Unix socket pair. Call this method before the
        first gRPC call arrives.
        """
        self._link = await Link.connect(connection, self._receive)
        return self._link

    async def credentials(self) -> grpc.ServerCredentials:
        """Wait for the certificate files, and return credentials that use the latest ones."""
        from .certificates import credentials_from_files  # slow to import

        await self._has_certificate.wait()
        return credentials_from_files(lambda: self._certificate)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return a handler that passes a call of any method to the server's process."""
        forward = partial(self._forward, handler_call_details.method)
        return grpc.stream_stream_rpc_method_handler(forward)

    def _receive(self, kind: int, number: int, payload: bytes) -> None:
        if kind == Frame.STOP:
            stopping = self._server.stop(pickle.loads(payload))
            self._stopping.append(asyncio.create_task(stopping))
        elif kind == Frame.CERTIFICATE:
            self._certificate = pickle.loads(payload)
            self._has_certificate.set()
        elif frames := self._frames.get(number):
            frames.put_nowait((kind, payload))

    async def _forward(self, method: str, _: object, context: Any) -> None:
        if self._pending.locked():
            message = "too many calls wait for the server's process; try again later"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        number, reading = next(self._numbers), None
        frames = self._frames[number] = asyncio.Queue[tuple[int, bytes]]()
        try:
            async with self._pending:
                metadata = [tuple(item) for item in context.invocation_metadata()]
                opening = pickle.dumps((method, context.peer(), metadata))
                self._link.send(Frame.OPEN, number, opening)
                kind, payload = await frames.get()
            while kind != Frame.STATUS:
                if kind == Frame.READ:
                    # In a task, because a STATUS frame can arrive before the client's message.
                    reading = asyncio.create_task(self._read(number, context))
                else:
                    await context.write(payload)
                    if kind == Frame.MESSAGE:
                        self._link.send(Frame.WRITTEN, number)
                kind, payload = await frames.get()
            _set_status(context, *pickle.loads(payload))
        finally:
            if reading:
                reading.cancel()
            del self._frames[number]
            self._link.send(Frame.CLOSED, number)

    async def _read(self, number: int, context: Any) -> None:
        try:
            message = await context.read()
        except grpc.aio.BaseError:
            return  # the call has ended, and `_forward` sends CLOSED
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # grpc's stubs lack EOF
            self._link.send(Frame.END, number)
        else:
            self._link.send(Frame.MESSAGE, number, message)


def _set_status(context: Any, code: int, details: str, trailing_metadata: Any) -> None:
    context.set_code(_CODES[code])
    context.set_details(details)
    context.set_trailing_metadata(trailing_metadata)
