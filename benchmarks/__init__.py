"""Command group `maskrcnn bench`: benchmarks of inference, serving, training and kernels."""

import click

from ..model.config.lazy_group import LazyGroup

# Folders that each define a command of the same name. An import of any benchmark's module runs this
# file first, so it imports no command.
_COMMANDS = ("bulk", "infer", "kernels", "serve", "train")


@click.group(cls=LazyGroup, targets={name: f"{__name__}.{name}:{name}" for name in _COMMANDS})
def bench() -> None:
    """Measure throughput and latency."""
