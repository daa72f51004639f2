"""Type of click options whose value is a compute capability of a GPU."""

import re

import click


class CapabilityType(click.ParamType[str]):
    """Type of click options whose value is a compute capability such as `8.9`."""

    name = "X.Y"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Return the value as text. Raise a usage error unless it has the form `X.Y`."""
        if not re.fullmatch(r"\d+\.\d", str(value)):
            self.fail(f"{value!r} is not a compute capability such as 8.9", param, ctx)
        return str(value)
