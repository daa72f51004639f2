"""Types of the options of commands."""

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """A range of finite numbers, which NaN is not: it is neither below nor above the ends."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number that a text stands for."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number
