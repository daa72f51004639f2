"""Messages as they come, before they are parsed: what would become many times larger is refused."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from ..errors import InvalidRequestError

_MAX_FIELDS: Final = 4096
"""Of a message and the messages in it. Each may take 90 bytes when it is parsed, and 2 before."""
_MAX_LISTED_BYTES: Final = 8 << 20
"""Of numbers and strings, which are read one by one, 8 MiB in some 60 ms. Pixels 800x1333 fit."""

_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5
"""Wire types; the others are those of groups, which no message here has."""
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
"""Types whose contents are taken over as they are, in no time and no more memory."""


class _Field(NamedTuple):
    number: int
    wire_type: int
    start: int
    """Of its contents in the message."""
    end: int


def check_message(message: bytes, kind: Descriptor) -> None:
    """Refuse a message that would hold up all else while it is parsed, or take too much memory.

    It is looked at as far as its limits go, whatever its size.

    Args:
        message: In protobuf's wire format.
        kind: What it is said to be.

    Raises:
        InvalidRequestError: it has too many fields, or too many numbers or strings.
        DecodeError: it is damaged; if it is not found so, it may be so nevertheless.
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
                f"{path} goes beyond the {_MAX_LISTED_BYTES >> 20} MiB of numbers and strings that "
                "a message may have; send images as files, or pixels as raw contents "
                "(raw_input_contents)"
            )


def _walk(
    message: bytes, start: int, end: int, kind: Descriptor, prefix: str
) -> Iterator[tuple[str, _Field]]:
    """The fields of a message and those in it, with the paths of those that are read one by one."""
    for field in _fields(message, start, end):
        known = kind.fields_by_number.get(field.number)
        if known is None or field.wire_type != _SIZED or known.type in _COPIED:
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
        elif wire_type == _SIZED:
            size, start = _varint(message, start)
            stop = start + size
        elif wire_type in (_FIXED32, _FIXED64):
            stop = start + (4 if wire_type == _FIXED32 else 8)
        else:
            raise DecodeError(f"wire type {wire_type}")
        if stop > end:
            raise DecodeError("a field is cut off")
        yield _Field(tag >> 3, wire_type, start, stop)
        start = stop


def _varint(message: bytes, start: int) -> tuple[int, int]:
    """A number of up to 10 bytes, and where it ends."""
    value = 0
    for index, byte in enumerate(message[start : start + 10]):
        value |= (byte & 127) << 7 * index
        if byte < 128:
            return value, start + index + 1
    raise DecodeError("a number is cut off")
