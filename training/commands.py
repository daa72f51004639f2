"""Command `maskrcnn train`."""

import click
from rich.console import Console

from .config_commands import ConfiguredCommand


@click.command(cls=ConfiguredCommand)
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--resume", is_flag=True, help="Resume the run in output_dir. If it has no run, start one."
)
@click.option("--amp", is_flag=True, help="Mixed precision: short for precision=fp16.")
@click.option(
    "--use-synthetic-data",
    is_flag=True,
    help="Replace the data sets by synthetic images, to measure training speed.",
)
@click.option(
    "--seeds",
    type=click.IntRange(min=2),
    metavar="N",
    help="Train N models with consecutive seeds. Print their AP, its mean and standard deviation.",
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

    CONFIG is a YAML file or the name of a preset. KEY=VALUE overrides a key of CONFIG, as in
    `solver.base_lr=0.01`. To train on several GPUs, run `torchrun --nproc-per-node N -m
    maskrcnn_trt train ...`.

    With --resume, the model, training data, seed, solver.optimizer and solver.images_per_batch
    must be those of the interrupted run. All other keys may change.
    """
    from .config import load_config
    from .data.synthetic.dataset import with_synthetic_data
    from .distributed import is_main_process
    from .run import run_training
    from .stability import STABILITY_FILE, train_seeds
    from .terminal import errors_of_main_process

    if amp:
        overrides = (*overrides, "precision=fp16")
    settings = load_config(config, overrides)
    if use_synthetic_data:
        settings = with_synthetic_data(settings)
    if seeds is not None:
        with errors_of_main_process():
            stability = train_seeds(settings, seeds, resume=resume)
        if is_main_process():
            Console().print(stability.table())
            click.echo(f"wrote all metrics to {settings.output_dir / STABILITY_FILE}")
        return
    with errors_of_main_process():
        checkpoint = run_training(settings, resume=resume)
    if is_main_process():
        click.echo(f"the final checkpoint is {checkpoint}")
