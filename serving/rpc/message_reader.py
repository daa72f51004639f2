"""Reading and parsing of request messages, with limits on slow clients and large messages."""

import asyncio
import inspect
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, Self

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from ..errors import ExpiredError, InvalidRequestError, QueueFullError, ServingError, StoppingError
from ..grpc_status import CallContext

# Maximum number of request messages that the server waits for at a time, per admission slot.
MESSAGES_PER_SLOT = 2
# Messages up to this size in bytes skip `check_message`: once parsed, they take at most 12 MiB.
_UNCHECKED_BYTES = 256 << 10
# Maximum number of fields in a message, including nested ones. A field of 2 bytes can take 90 bytes
# once parsed.
_MAX_FIELDS: Final = 4096
# Maximum total size in bytes of a message's packed varints and strings. They are parsed one by one:
# 8 MiB take about 60 ms. The pixels of an 800x1333 image, as packed varints, fit.
_MAX_LISTED_BYTES: Final = 8 << 20

# Protobuf wire types. Types 3 and 4 belong to groups, which our messages do not use.
_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
# Field types that protobuf copies as a block. This is fast and takes no additional memory, so they
# do not count towards `_MAX_LISTED_BYTES`.
_COPIED: Final = frozenset(
    {
        FieldDescriptor.TYPE_BYTES,
        FieldDescriptor.TYPE_FLOAT,
        FieldDescriptor.TYPE_DOUBLE,
        FieldDescriptor.TYPE_FIXED32,
        FieldDescriptor.TYPE_FIXED64,
        FieldDescriptor.TYPE_SFIXED32,
        FieldDescriptor.TYPE_SFIXED64,
    }
)

_Parse = Callable[[bytes], Any]


@dataclass(eq=False, slots=True)
class _Wait:
    """One task's wait for a request message."""

    task: "asyncio.Task[Any]"
    # gRPC peer of the call; it identifies the client's connection.
    peer: str
    # Time limit in seconds, and deadline in seconds of `time.monotonic`. May be infinite.
    timeout_s: float
    deadline: float
    # Number of requests to cancel the task that were made before the wait.
    cancelling: int
    # Error that ended the wait. None: the wait goes on.
    error: ServingError | None = None

    def end(self, error: ServingError) -> None:
        """Cancel the wait unless it is cancelled already. The waiting task then raises `error`."""
        if self.error is None:
            self.error = error
            self.task.cancel()


class PendingMessages:
    """Bounded set of concurrent waits for request messages.

    If the set is full, a new wait cancels the oldest wait of the connection with the most waits.
    """

    # The bound limits the memory that slow clients occupy. The wait of a fast client is seldom
    # cancelled, because its message arrives before the wait becomes the oldest.

    def __init__(self, capacity: int) -> None:
        """Allow up to `capacity` calls to wait for their message at the same time."""
        self._capacity = capacity
        # The waits, in order of their start.
        self._waits: dict[_Wait, None] = {}
        # Timer of the earliest deadline, or of an earlier one. All waits share one timer, because
        # starting and cancelling a timer per wait takes longer than most other steps of a call.
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """Cancel all waits for request messages, and reject new waits."""
        self._is_stopped = True
        for wait in self._waits:
            wait.end(StoppingError("the server is stopping"))

    async def next(self, context: CallContext, timeout_s: float | None) -> bytes | None:
        """Wait for the next message of a call.

        Args:
            context: gRPC context of a call without a request deserializer.
            timeout_s: Maximum time to wait, in seconds. None: no limit.

        Returns:
            The serialised message. None: the client sends no more messages.

        Raises:
            ExpiredError: the message did not arrive in time.
            QueueFullError: too many calls wait for messages, and a newer wait cancelled this one.
            StoppingError: the server is stopping.
        """
        if self._is_stopped:
            raise StoppingError("the server is stopping")
        if len(self._waits) >= self._capacity:
            self._cancel_oldest()
        wait = self._start(context.peer(), math.inf if timeout_s is None else timeout_s)
        try:
            message = await context.read()
            # grpc's stubs lack EOF.
            return None if message is grpc.aio.EOF else message  # type: ignore[attr-defined]
        except asyncio.CancelledError:
            # If something else cancelled the task too, the cancellation goes on.
            if wait.error is None or wait.task.uncancel() > wait.cancelling:
                raise
            raise wait.error from None
        finally:
            self._waits.pop(wait, None)
            # Otherwise, the error would refer to itself through its traceback, and only a full
            # garbage collection would free the part of the message that has arrived.
            del wait

    def _start(self, peer: str, timeout_s: float) -> _Wait:
        task = asyncio.current_task()
        assert task
        wait = _Wait(task, peer, timeout_s, time.monotonic() + timeout_s, task.cancelling())
        self._waits[wait] = None
        if self._timer is None or wait.deadline < self._timer.when():
            self._start_timer(wait.deadline)
        return wait

    def _cancel_oldest(self) -> None:
        ((peer, _),) = Counter(wait.peer for wait in self._waits).most_common(1)
        oldest = next(wait for wait in self._waits if wait.peer == peer)
        del self._waits[oldest]
        oldest.end(
            QueueFullError(
                "the server is receiving too many requests at once (the limit depends on "
                "queue_size), so it dropped this request, the oldest of its connection that has "
                "not arrived completely; try again later"
            )
        )

    def _start_timer(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if deadline < math.inf:
            # `time.monotonic` is the clock of asyncio's event loops.
            self._timer = asyncio.get_running_loop().call_at(deadline, self._end_expired)

    def _end_expired(self) -> None:
        """End the waits whose deadlines have passed, and start the timer for the others."""
        now = time.monotonic()
        for wait in self._waits:
            if wait.deadline <= now:
                wait.end(
                    ExpiredError(
                        f"the request did not arrive completely within {wait.timeout_s:g} s; send "
                        "a smaller request, or raise the server's --receive-timeout-s"
                    )
                )
        later = (wait.deadline for wait in self._waits if now < wait.deadline)
        self._start_timer(min(later, default=math.inf))


def call_handler(
    handler: Any, pending: PendingMessages, timeout_s: float
) -> Callable[[Any], Awaitable[Any]]:
    """Return an asynchronous function that processes a call of a gRPC method.

    The function takes the call's gRPC context, reads and parses the requests, and passes them to
    `handler`. For a method with one request, the function returns the handler's response. For a
    method with a stream of requests, the function writes the responses to the context.

    Args:
        handler: `grpc.RpcMethodHandler` of the method.
        pending: Set that limits the concurrent waits for messages.
        timeout_s: Maximum time to receive the request, in seconds. It does not apply to streams.
    """
    if handler.request_streaming:
        return partial(_handle_stream, handler, pending)
    return partial(_handle_single, handler, pending, timeout_s)


async def _handle_single(
    handler: Any, pending: PendingMessages, timeout_s: float, context: Any
) -> Any:
    request = await _read_request(pending, handler.request_deserializer, context, timeout_s)
    if request is None:
        # gRPC answers a too large message itself, and then reports the end of the call.
        raise InvalidRequestError(
            "the client ended the call without sending a request, or sent one that is larger than "
            "the server's max_message_mb"
        )
    responding = (handler.unary_unary or handler.unary_stream)(request, context)
    del request  # only `responding` holds the request, which can be large
    return await responding


async def _handle_stream(handler: Any, pending: PendingMessages, context: Any) -> None:
    parse, behaviour = handler.request_deserializer, handler.stream_stream
    requests = _RequestStream(partial(_read_request, pending, parse, context, None))
    try:
        if inspect.isasyncgenfunction(behaviour):
            async for response in behaviour(requests, context):
                await context.write(response)
        else:
            await behaviour(requests, context)
    except ExceptionGroup as failures:
        # gRPC treats some exceptions specially, but not within a TaskGroup's ExceptionGroup.
        raise failures.exceptions[0] from None
    requests.raise_failure()


class _RequestStream:
    """Asynchronous iterator over a call's requests.

    If a message cannot be read or parsed, the iteration ends. `raise_failure` then raises the
    error; call it when the requests before that message have been processed.
    """

    # A generator would keep a reference to each request until the next one is read.

    def __init__(self, read: Callable[[], Awaitable[Any | None]]) -> None:
        self._read = read
        self._failure: ServingError | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            request = await self._read()
        except ServingError as error:
            self._failure = error
            raise StopAsyncIteration from None
        if request is None:
            raise StopAsyncIteration
        return request

    def raise_failure(self) -> None:
        """Raise the error that ended the iteration over the requests, if any."""
        if self._failure is not None:
            raise self._failure


async def _read_request(
    pending: PendingMessages, parse: _Parse, context: CallContext, timeout_s: float | None
) -> Any | None:
    message = await pending.next(context, timeout_s)
    if message is None:
        return None
    try:
        if len(message) > _UNCHECKED_BYTES:
            check_message(message, parse.__self__.DESCRIPTOR)  # type: ignore[attr-defined]
        return parse(message)
    except DecodeError:
        raise InvalidRequestError(
            "cannot parse the request; was the client built from another .proto?"
        ) from None


class _Field(NamedTuple):
    number: int
    wire_type: int
    # Byte range of the contents in the message.
    start: int
    end: int


def check_message(message: bytes, kind: Descriptor) -> None:
    """Reject a message whose parsing would block the event loop or take too much memory.

    The check ends at the first exceeded limit, so its own duration is bounded.

    Args:
        message: Message in protobuf's wire format.
        kind: Descriptor of the expected message type.

    Raises:
        InvalidRequestError: the message has more than 4096 fields, or more than 8 MiB of packed
            varints and strings.
        DecodeError: the message is malformed. Not every malformed message is detected.
    """
    listed_bytes = 0
    for number, (path, field) in enumerate(_walk(message, 0, len(message), kind, ""), start=1):
        if number > _MAX_FIELDS:
            raise InvalidRequestError(
                f"the message has more than {_MAX_FIELDS} fields; send fewer images at once, and "
                "pixels as raw contents (raw_input_contents)"
            )
        if path:
            listed_bytes += field.end - field.start
        if listed_bytes > _MAX_LISTED_BYTES:
            raise InvalidRequestError(
                f"the message has more than {_MAX_LISTED_BYTES >> 20} MiB in lists of integers and "
                f"strings (the limit is exceeded at the field {path}); send each image as a JPEG "
                "or PNG file, or send pixels as raw contents (raw_input_contents)"
            )


def _walk(
    message: bytes, start: int, end: int, kind: Descriptor, prefix: str
) -> Iterator[tuple[str, _Field]]:
    """Yield `(path, field)` for each field in `message[start:end]`, including nested fields.

    `kind` is the type of the message in this range. `field` has the field's number, wire type and
    byte range in `message`. If the field counts towards `_MAX_LISTED_BYTES` (strings and packed
    varints), `path` is `prefix` plus the field's dotted name. Otherwise, `path` is empty.
    """
    for field in _fields(message, start, end):
        known = kind.fields_by_number.get(field.number)
        if known is None or field.wire_type != _LENGTH_DELIMITED or known.type in _COPIED:
            yield "", field
            continue
        path = prefix + known.name
        if known.message_type is None:
            yield path, field
        else:
            yield "", field
            yield from _walk(message, field.start, field.end, known.message_type, f"{path}.")


def _fields(message: bytes, start: int, end: int) -> Iterator[_Field]:
    while start < end:
        tag, start = _varint(message, start)
        wire_type = tag & 7
        if wire_type == _VARINT:
            _, stop = _varint(message, start)
        elif wire_type == _LENGTH_DELIMITED:
            size, start = _varint(message, start)
            stop = start + size
        elif wire_type in (_FIXED32, _FIXED64):
            stop = start + (4 if wire_type == _FIXED32 else 8)
        else:
            raise DecodeError(f"unknown protobuf wire type {wire_type}")
        if stop > end:
            raise DecodeError("a protobuf field is truncated")
        yield _Field(tag >> 3, wire_type, start, stop)
        start = stop


def _varint(message: bytes, start: int) -> tuple[int, int]:
    """Decode the varint at offset `start`. Return its value and the offset after its last byte."""
    value = 0
    for index, byte in enumerate(message[start : start + 10]):
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, start + index + 1
    raise DecodeError("a protobuf varint is truncated")
