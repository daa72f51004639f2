"""Formatting of numbers with nouns, and of lists of names, for messages."""

from collections.abc import Sequence


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, as in `1 image` or `2 images`.

    Args:
        number: The number.
        noun: The noun in the singular.
        plural: The noun in the plural. If it is empty, an s is added to the singular.
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def abbreviated(names: Sequence[str], limit: int = 3) -> str:
    """Return the first `limit` names and the number of others, as in `a, b, c and 4 more`."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
