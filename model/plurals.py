"""Formatting of numbers with singular or plural nouns, for messages."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, as in `1 image` or `2 images`.

    Args:
        number: The number.
        noun: The noun in the singular.
        plural: The noun in the plural. If it is empty, an s is added to the singular.
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
