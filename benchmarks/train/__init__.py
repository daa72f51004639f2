"""`maskrcnn bench train`: training speed and losses by precision."""

from pathlib import Path
from typing import get_args

import click

from ...model.plurals import counted
from ..common.record import json_option, output_option, publish
from .measure import (
    TrainPeer,
    TrainPrecision,
    TrainResult,
    TrainSettings,
    measure_train_rooflines,
    measure_training,
)
from .record import train_record


@click.command(context_settings={"show_default": True})
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--precision", "precisions", multiple=True, type=click.Choice(get_args(TrainPrecision)),
    help="Precision to train in; repeatable. Default: on a GPU all, on a CPU fp32 and bf16.",
)  # fmt: skip
@click.option(
    "--peer", "peers", multiple=True, type=click.Choice(get_args(TrainPeer)),
    help="Baseline: also train torchvision's model, or this project's without compilation. "
    "Repeatable.",
)  # fmt: skip
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=1,
    help="Number of consecutive seeds, each for one run.",
)
@click.option("--evaluate", is_flag=True, help="Measure the average precision after each run.")
@click.option("--gpus", type=click.IntRange(min=1), help="Number of GPUs; short for device=0,1,...")
@click.option("--use-synthetic-data", is_flag=True, help="Train on synthetic images.")
@click.option("--iterations", type=click.IntRange(min=1), default=100, help="Steps of each run.")
@click.option(
    "--warmup", type=click.IntRange(min=0), default=10, help="Untimed first steps of each run."
)
@json_option
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
    json_path: Path | None,
    output: Path | None,
) -> None:
    """Train a configuration in several precisions, and compare speed and losses.

    CONFIG is a configuration file or the name of a preset, and KEY=VALUE changes one of its keys,
    as for `maskrcnn train`. Runs with the same seed start from the same weights and use the same
    batches. No run writes a checkpoint.
    """
    import torch

    from ...training.config import load_config
    from ...training.data.synthetic.dataset import with_synthetic_data
    from ...training.distributed import local_device

    if warmup >= iterations:
        raise click.UsageError(
            f"--warmup {warmup} must be less than --iterations {iterations}, because warm-up "
            "iterations are not timed; lower --warmup, or raise --iterations"
        )
    if gpus is not None:
        # Otherwise, the error would name the key `device`, which the user has not set.
        if gpus > (available := torch.cuda.device_count()):
            raise click.UsageError(
                f"--gpus {gpus}, but torch sees {counted(available, 'GPU')}; lower this option, or "
                "leave it out"
            )
        overrides += (f"device={','.join(map(str, range(gpus)))}",)
    train_config = load_config(config, overrides)
    if use_synthetic_data:
        train_config = with_synthetic_data(train_config)
    on_gpu = local_device(train_config.device).type == "cuda"
    if not precisions:
        precisions = get_args(TrainPrecision) if on_gpu else ("fp32", "bf16")
    settings = TrainSettings(
        precisions=precisions,
        iterations=iterations,
        warmup=warmup,
        peers=peers,
        seeds=seeds,
        with_average_precision=evaluate,
    )
    runs = measure_training(
        train_config,
        settings,
        on_run=lambda engine, precision: click.echo(
            f"measuring {engine} in {precision} ...", err=True
        ),
    )
    rooflines = measure_train_rooflines(train_config, precisions) if on_gpu else []
    results: list[TrainResult] = []
    try:
        for result in runs:
            click.echo(f"  {result.images_per_second:.1f} images/s", err=True)
            results.append(result)
    finally:
        # If a run fails or is interrupted, keep the results of those before it.
        if results:
            publish(train_record(results, rooflines), json_path, output)
