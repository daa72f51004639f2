"""Compute capabilities of GPUs, as they are given on the command line."""

import re

import click


class CapabilityType(click.ParamType[str]):
    """A compute capability on the command line, as in `8.9`."""

    name = "X.Y"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Check a value; what is wrong with it is a usage error."""
        if not re.fullmatch(r"\d+\.\d", str(value)):
            self.fail(f"{value!r} is no compute capability such as 8.9", param, ctx)
        return str(value)
