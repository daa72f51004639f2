"""Command group `maskrcnn bench`: benchmarks of inference, serving, training and kernels."""

import click

from ..model.config.lazy_group import LazyGroup

# Folders that each define a command of the same name. This file does not import the commands,
# because an import of any module of a benchmark runs this file first.
_COMMANDS = ("bulk", "infer", "kernels", "serve", "train")


@click.group(cls=LazyGroup, targets={name: f"{__name__}.{name}:{name}" for name in _COMMANDS})
def bench() -> None:
    """Measure throughput and latency of inference, serving, training and kernels."""
