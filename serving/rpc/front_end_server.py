"""gRPC server whose connections are accepted by front-end processes."""

import asyncio
import logging
import pickle
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import grpc

from ..config import ServeConfig, address_of
from ..errors import ServingError
from ..host import ChildProcess, visible_gpus
from .certificates import CertificateFiles, ServerCertificate
from .front_end_link import CallDetails, FindHandler, ForwardedCall, Frame, Link
from .front_end_process import run_front_end
from .listener import bind_address, listen_error, server_options

_log = logging.getLogger(__name__)

# Name of the front-end processes in top, ps and messages.
FRONT_END_NAME: Final = "front end"
# When the server stops, a front-end process is killed if it still runs this many seconds after the
# time limit of its open calls.
_END_S: Final = 5.0
# A front-end process that ends within this many seconds of its start is restarted after a pause.
_MIN_UPTIME_S: Final = 10.0
# First and longest pause in seconds. The pause doubles each time the process ends early again.
_MIN_PAUSE_S: Final = 0.5
_MAX_PAUSE_S: Final = 30.0
# Interval in seconds at which the certificate files are checked for changes.
_REFRESH_S: Final = 1.0


def front_end_count(config: ServeConfig) -> int:
    """Return the number of front-end processes, or 0 if the server's process accepts connections.

    The number is `config.front_ends`. If that setting is None, the number is the number of GPUs, or
    0 if there are fewer than two GPUs.

    Raises:
        BackendError: the GPU driver does not respond.
    """
    if config.front_ends is not None:
        return config.front_ends
    gpus = len(visible_gpus())
    return gpus if gpus > 1 else 0


class FrontEndServer:
    """gRPC server whose connections are accepted by front-end processes.

    The services run in the server's process, which creates this object. The front-end processes
    share the port through SO_REUSEPORT: the kernel distributes the connections among them. If a
    front-end process ends, it is restarted.
    """

    def __init__(
        self,
        count: int,
        config: ServeConfig,
        certificate: ServerCertificate | None,
        interceptors: Sequence[grpc.aio.ServerInterceptor],  # type: ignore[type-arg]  # generic in stubs only
    ) -> None:
        """Reserve the gRPC port. The method `start` starts the front-end processes.

        Args:
            count: Number of front-end processes.
            config: Server settings.
            certificate: TLS certificate. None: connections are not encrypted.
            interceptors: Interceptors of all calls, the outermost first.

        Raises:
            ServingError: the server cannot listen on the address.
        """
        self._reserved = _reserved_port(config.host, config.port)
        self.port: int = self._reserved.getsockname()[1]
        self._arguments = (
            address_of(config.host, self.port),
            server_options(config, count),
            certificate is not None,
        )
        self._certificate = certificate
        self._generic_handlers: list[Any] = []
        self._handlers: dict[str, Any] = {}
        self._find_handler: FindHandler = self._own_handler
        for interceptor in reversed(interceptors):
            self._find_handler = partial(interceptor.intercept_service, self._find_handler)
        self._count = count
        self._front_ends: list[_FrontEnd] = []
        self._background: list[asyncio.Task[None]] = []

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[Any]) -> None:
        """Add generic RPC handlers, as in `grpc.aio.Server`."""
        self._generic_handlers += generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Add the handlers of a service's methods, by method name, as in `grpc.aio.Server`."""
        self._handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    async def start(self) -> None:
        """Start the front-end processes, and wait until all accept connections.

        Raises:
            ServingError: a front-end process ended before it accepted connections.
        """
        self._front_ends = [self._new_front_end() for _ in range(self._count)]
        await asyncio.gather(*(front_end.start() for front_end in self._front_ends))
        self._background = [
            asyncio.create_task(self._restart_when_ended(index)) for index in range(self._count)
        ]
        if self._certificate:
            self._background.append(asyncio.create_task(self._refresh_certificate()))

    async def stop(self, grace: float | None = None) -> None:
        """Reject new calls, wait for open ones, and end the front-end processes. Idempotent.

        Args:
            grace: Time limit of the open calls in seconds. None: cancel them at once.
        """
        for task in self._background:
            task.cancel()
        await asyncio.gather(*(front_end.stop(grace) for front_end in self._front_ends))
        self._reserved.close()

    async def _own_handler(self, details: CallDetails) -> Any:
        if handler := self._handlers.get(details.method):
            return handler
        found = (own.service(details) for own in self._generic_handlers)
        return next((handler for handler in found if handler is not None), None)

    def _new_front_end(self) -> "_FrontEnd":
        return _FrontEnd(self._arguments, self._certificate, self._find_handler)

    async def _refresh_certificate(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH_S)
            try:
                for front_end in self._front_ends:
                    front_end.send_certificate()
            except Exception:  # the next attempt may succeed
                _log.exception("sending the certificate files to the front-end processes failed")

    async def _restart_when_ended(self, index: int) -> None:
        """Restart front-end process number `index`, counted from 0, whenever it ends."""
        loop, pause_s = asyncio.get_running_loop(), 0.0
        while True:
            started = loop.time()
            reason = await self._front_ends[index].ended()
            is_short = loop.time() - started < _MIN_UPTIME_S
            pause_s = min(max(2 * pause_s, _MIN_PAUSE_S), _MAX_PAUSE_S) if is_short else 0.0
            _log.error(
                "%s; its connections are lost; a new front-end process starts in %g s",
                reason,
                pause_s,
            )
            await asyncio.sleep(pause_s)
            try:
                self._front_ends[index] = self._new_front_end()
                await self._front_ends[index].start()
            except ServingError:
                pass  # the new process has ended already; the next iteration logs that
            except OSError as error:  # too many processes or open files, or too little memory
                _log.error("cannot start a front-end process: %s", error)


class _FrontEnd:
    """Handle of a front-end process and of the calls that the process received."""

    def __init__(
        self,
        arguments: tuple[Any, ...],
        certificate: ServerCertificate | None,
        find_handler: FindHandler,
    ) -> None:
        """Start the front-end process.

        Args:
            arguments: Arguments of `run_front_end` except the first, `handle`.
            certificate: TLS certificate. None: connections are not encrypted.
            find_handler: Function that returns the handler of a call, or None if the method is
                unknown.
        """
        self._certificate = certificate
        # Certificate files that the process uses. None: none were sent.
        self._sent: CertificateFiles | None = None
        self._find_handler = find_handler
        self._calls: dict[int, ForwardedCall] = {}
        self._is_ready = False
        # Set when the process accepts connections, or when it ends before it accepts any.
        self._started = asyncio.Event()
        self._socket, there = socket.socketpair()
        with there:
            handle = there.fileno()
            self._process = ChildProcess(
                FRONT_END_NAME, run_front_end, (handle, *arguments), handles=[handle]
            )
        self._link: Link | None = None

    async def start(self) -> None:
        """Wait until the front-end process accepts connections.

        Raises:
            ServingError: the process ended before it accepted connections.
        """
        self._link = await Link.connect(self._socket, self._receive)
        self._link.closed.add_done_callback(self._close_calls)
        self.send_certificate()
        await self._started.wait()
        if not self._is_ready:
            raise ServingError(f"{await self.ended()}; see the log for the reason")

    def send_certificate(self) -> None:
        """Send the certificate files to the front-end process, unless it already uses them."""
        if self._certificate and self._link and (files := self._certificate.files) != self._sent:
            self._link.send(Frame.CERTIFICATE, payload=pickle.dumps(files))
            self._sent = files

    async def ended(self) -> str:
        """Wait until the front-end process ends. Return a text with its exit status or signal."""
        return await asyncio.wrap_future(self._process.exited)

    async def stop(self, grace: float | None) -> None:
        """Stop the front-end process once its calls have ended.

        Args:
            grace: Time limit of the open calls in seconds. None: cancel them at once. If the
                process still runs `_END_S` seconds after this limit, it is killed.
        """
        if self._link and self._is_ready:
            self._link.send(Frame.STOP, payload=pickle.dumps(grace))
        else:
            self._process.kill()
        try:
            async with asyncio.timeout((grace or 0) + _END_S):
                await self.ended()
        except TimeoutError:
            self._process.kill()
        if self._link:
            await self._link.closed
        if tasks := [call.task for call in self._calls.values()]:
            await asyncio.wait(tasks, timeout=_END_S)

    def _receive(self, kind: int, number: int, payload: bytes) -> None:
        if kind == Frame.OPEN:
            self._open_call(number, payload)
        elif kind == Frame.READY:
            self._is_ready = True
            self._started.set()
        else:
            call = self._calls[number]
            if kind == Frame.MESSAGE:
                call.receive(payload)
            elif kind == Frame.END:
                call.receive(grpc.aio.EOF)  # type: ignore[attr-defined]  # grpc's stubs lack EOF
            elif kind == Frame.WRITTEN:
                call.confirm_write()
            else:
                call.close()

    def _open_call(self, number: int, opening: bytes) -> None:
        def forget(_: object) -> None:
            del self._calls[number]

        assert self._link is not None
        call = self._calls[number] = ForwardedCall(self._link, number, opening)
        call.add_done_callback(forget)
        call.start(self._find_handler)

    def _close_calls(self, _: object) -> None:
        self._started.set()
        for call in list(self._calls.values()):
            call.close()


def _reserved_port(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to a port but does not listen.

    While the socket is open, it reserves the port. The front-end processes listen on this port with
    sockets of their own.

    Raises:
        ServingError: the port is in use, or the host is not an address of this machine.
    """
    family, address = bind_address(host, port)
    reserved = socket.socket(family)
    try:
        # Connections of an earlier server may still use the port, so SO_REUSEADDR is set while
        # binding. SO_REUSEPORT lets the front-end processes share the port. It is set only after
        # binding, because otherwise two servers could reserve the same port.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
        reserved.bind(address)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        reserved.close()
        raise listen_error(address_of(host, port)) from None
    return reserved
