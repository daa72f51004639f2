"""Progress callback of downloads and of checksum computations."""

from collections.abc import Callable

# Progress callback. Arguments: step such as `checking val2017.zip`, bytes done, bytes in total
# (None: unknown).
ByteProgress = Callable[[str, int, int | None], object]


def no_progress(step: str, done: int, total: int | None) -> None:
    """Do nothing. Progress callback for downloads without progress bars."""
