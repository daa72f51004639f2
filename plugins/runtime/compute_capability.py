"""Command-line type for compute capabilities of GPUs."""

import re

import click


class CapabilityType(click.ParamType[str]):
    """Option type of a compute capability such as `8.9`."""

    name = "X.Y"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Return the value as text. Raise a usage error unless it has the form `X.Y`."""
        if not re.fullmatch(r"\d+\.\d", str(value)):
            self.fail(f"{value!r} is not a compute capability such as 8.9", param, ctx)
        return str(value)
