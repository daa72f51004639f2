"""Types of command-line options."""

import math
from typing import Any

import click


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
