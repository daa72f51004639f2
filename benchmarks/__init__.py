"""Command group `maskrcnn bench`: benchmarks of inference, serving, training and kernels."""

from importlib import import_module

import click

# Folders that each define a command of the same name.
_COMMANDS = ("bulk", "infer", "kernels", "serve", "train")


# An import of any benchmark's module runs this file first. It therefore imports no command.
class _LazyGroup(click.Group):
    """Click group that imports the folder of a subcommand only when the subcommand is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = getattr(import_module(f".{cmd_name}", __package__), cmd_name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_LazyGroup)
def bench() -> None:
    """Measure throughput and latency."""
