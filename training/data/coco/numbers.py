"""Read numbers and ids that programs write as other JSON types, such as "480" or 480.0."""

from typing import Any

# Integers must fit in signed 64 bits.
_LIMIT = 2**63


def integer_from(value: Any) -> int | None:
    """Return an integer, integral float or string of digits as `int`.

    None: any other value, or one that does not fit in signed 64 bits.
    """
    if type(value) is int:  # the common case
        return value if -_LIMIT <= value < _LIMIT else None
    is_digits = isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20
    if is_digits or (isinstance(value, float) and value.is_integer()):
        return integer_from(int(value))
    return None


def id_from(value: Any) -> int | str | None:
    """Return the id that a JSON value stands for: `480.0` and `"480"` become 480.

    Any other string that is not empty stays `str`. None: any other value, such as 480.5, or an
    integer of more than 64 bits.
    """
    number = integer_from(value)
    if number is not None:
        return number
    return value if isinstance(value, str) and value else None
