"""Protocol buffers' text format, of which writing needs no schema."""

import json
from collections.abc import Iterator, Mapping
from typing import Any


class BareWord(str):
    """The name of an enum's value, or `true` or `false`, which stand without quotes."""


def text_from_message(message: Mapping[str, Any]) -> str:
    """A message as text.

    Args:
        message: Values by field: a string, a number, a mapping for a message, a list of them for a
            repeated field.
    """
    return "\n".join(_lines(message)) + "\n"


def _lines(message: Mapping[str, Any]) -> Iterator[str]:
    for name, field in message.items():
        for value in field if isinstance(field, list) else [field]:
            if isinstance(value, Mapping):
                yield f"{name} {{"
                yield from (f"  {line}" for line in _lines(value))
                yield "}"
            else:
                yield f"{name}: {_scalar(value)}"


def _scalar(value: str | int) -> str:
    if isinstance(value, str) and not isinstance(value, BareWord):
        return json.dumps(value, ensure_ascii=False)
    return str(value)
