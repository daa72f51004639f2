"""Types of command-line options."""

import math
import os
from pathlib import Path
from typing import Any

import click

from ..atomic_files import check_creatable


class FiniteRange(click.FloatRange):
    """Range of finite numbers: like `click.FloatRange`, but rejects NaN and infinity."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Parse a number. Raise a usage error unless it is finite and in range."""
        # `FloatRange` accepts NaN, which compares as neither below nor above the bounds.
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class _OutputPath(click.Path):
    """Path that a command writes: like `click.Path`, but rejects paths that cannot be created."""

    def __init__(self, suffix: str = "", **options: Any) -> None:
        """Create the type.

        Args:
            suffix: required end of the name; see `check_creatable`.
            options: arguments of `click.Path`.
        """
        super().__init__(**options)
        self._suffix = suffix

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path. Raise a usage error unless it can be created or replaced."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        try:
            check_creatable(path, self._suffix)
        except OSError as error:
            self.fail(f"{path}: {error.strerror}; choose another path", param, ctx)
        return path


OUTPUT_FILE = _OutputPath(dir_okay=False)
HTML_FILE = _OutputPath(".html", dir_okay=False)
JSON_FILE = _OutputPath(".json", dir_okay=False)
OUTPUT_FOLDER = _OutputPath(file_okay=False)
