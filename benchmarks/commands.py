"""The command group `maskrcnn bench`."""

import click

from .bulk import bulk
from .infer import infer
from .kernels import kernels
from .serve import serve
from .train import train


@click.group()
def bench() -> None:
    """Measure throughput and latency."""


for command in (bulk, infer, kernels, serve, train):
    bench.add_command(command)
