"""Command group that imports its subcommands on demand."""

import importlib
from collections.abc import Mapping
from typing import Any

import click


class LazyGroup(click.Group):
    """Click group that imports the module of a subcommand only when the subcommand is used."""

    def __init__(self, *arguments: Any, targets: Mapping[str, str], **options: Any) -> None:
        """Create a group. `targets` maps a subcommand's name to `package.module:attribute`.

        The other arguments are those of `click.Group`.
        """
        super().__init__(*arguments, **options)
        self._targets = targets

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the subcommands, in the order of `targets`."""
        return list(self._targets)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a subcommand. Return None if no subcommand has this name."""
        if cmd_name not in self._targets:
            return None
        module, _, attribute = self._targets[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command
