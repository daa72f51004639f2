"""`maskrcnn bench train`: training speed and losses by precision."""

from pathlib import Path
from typing import get_args

import click

from ..common.record import output_option, publish
from .run import TrainPeer, TrainPrecision


@click.command(context_settings={"show_default": True})
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--precision", "precisions", multiple=True, type=click.Choice(get_args(TrainPrecision)),
    default=get_args(TrainPrecision), help="Repeatable.",
)  # fmt: skip
@click.option(
    "--peer", "peers", multiple=True, type=click.Choice(get_args(TrainPeer)),
    help="Baseline: also train torchvision's model, or the same model without compilation. "
    "Repeatable.",
)  # fmt: skip
@click.option("--seeds", type=click.IntRange(min=1), default=1, help="Runs with consecutive seeds.")
@click.option("--evaluate", is_flag=True, help="Measure the average precision after each run.")
@click.option("--gpus", type=click.IntRange(min=1), help="Number of GPUs; short for device=0,1,...")
@click.option("--use-synthetic-data", is_flag=True, help="Train on synthetic images.")
@click.option("--iterations", type=click.IntRange(min=1), default=100, help="Steps of each run.")
@click.option(
    "--warmup", type=click.IntRange(min=0), default=10, help="Untimed first steps of each run."
)
@output_option("a page, plots of the losses")
def train(
    config: str,
    overrides: tuple[str, ...],
    precisions: tuple[TrainPrecision, ...],
    peers: tuple[TrainPeer, ...],
    seeds: int,
    evaluate: bool,
    gpus: int | None,
    use_synthetic_data: bool,
    iterations: int,
    warmup: int,
    output: Path | None,
) -> None:
    """Train a configuration in several precisions, and compare speed and losses.

    CONFIG and KEY=VALUE are those of `maskrcnn train`. Runs of one seed start from the same weights
    and use the same batches. No run writes a checkpoint.
    """
    from ...training.config import load_config
    from ...training.data.synthetic.dataset import with_synthetic_data
    from .measure import measure_training
    from .record import train_record
    from .run import TrainSettings

    if warmup >= iterations:
        raise click.UsageError(
            f"--warmup {warmup} leaves none of the {iterations} iterations to time; lower "
            "--warmup, or raise --iterations"
        )
    if gpus is not None:
        overrides += (f"device={','.join(map(str, range(gpus)))}",)
    train_config = load_config(config, overrides)
    if use_synthetic_data:
        train_config = with_synthetic_data(train_config)
    settings = TrainSettings(
        precisions=precisions,
        iterations=iterations,
        warmup=warmup,
        peers=peers,
        seeds=seeds,
        with_average_precision=evaluate,
    )
    results = measure_training(
        train_config,
        settings,
        on_run=lambda engine, precision: click.echo(
            f"measuring {engine} in {precision} ...", err=True
        ),
    )
    publish(train_record(results), folder=output)
