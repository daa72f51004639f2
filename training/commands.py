"""The verb `train`."""

import click
from rich.console import Console

from .config_commands import ConfiguredCommand


@click.command(cls=ConfiguredCommand)
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--resume", is_flag=True, help="Continue the run in output_dir if there is one.")
@click.option("--amp", is_flag=True, help="Mixed precision; short for precision=fp16.")
@click.option(
    "--use-synthetic-data", is_flag=True, help="Train on drawn pictures, to measure speed."
)
@click.option(
    "--seeds",
    type=click.IntRange(min=2),
    metavar="N",
    help="Train N times, from seeds that count up, and compare the AP.",
)
def train(
    config: str,
    overrides: tuple[str, ...],
    resume: bool,
    amp: bool,
    use_synthetic_data: bool,
    seeds: int | None,
) -> None:
    """Train a model.

    CONFIG is a YAML file or the name of a preset; KEY=VALUE sets single keys, as in
    `solver.base_lr=0.01`. For several processes run `torchrun --nproc-per-node N -m maskrcnn_trt
    train ...`.

    What --resume finds is continued with the keys given now. The model, the training data, the
    seed, solver.optimizer and solver.images_per_batch must be as they were; all else may change.
    """
    from .config import load_config
    from .data.stand_in import with_synthetic_data
    from .distributed import is_main_process
    from .run import run_training
    from .stability import STABILITY_FILE, train_seeds
    from .terminal import said_once

    if amp:
        overrides = (*overrides, "precision=fp16")
    settings = load_config(config, overrides)
    if use_synthetic_data:
        settings = with_synthetic_data(settings)
    if seeds is not None:
        with said_once():
            stability = train_seeds(settings, seeds, resume=resume)
        if is_main_process():
            Console().print(stability.table())
            click.echo(f"all metrics are in {settings.output_dir / STABILITY_FILE}")
        return
    with said_once():
        checkpoint = run_training(settings, resume=resume)
    if is_main_process():
        click.echo(f"the final checkpoint is {checkpoint}")
