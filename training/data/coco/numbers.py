"""Read numbers and ids that programs write as other JSON types, such as "480" or 480.0."""

from typing import Any


def integer_from(value: Any) -> int | None:
    """Return an integer, integral float or string of digits as `int`. None: another value."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        return int(value)
    return None


def id_from(value: Any) -> int | str | None:
    """Return an id as `int` if it is integral, else as `str`. None: neither number nor string."""
    number = integer_from(value)
    if number is not None:
        # Ids are stored as 64-bit integers.
        return number if -(2**63) <= number < 2**63 else str(number)
    return value if isinstance(value, str) and value else None
