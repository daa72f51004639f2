"""Command `maskrcnn train`."""

import difflib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..plugins.runtime.console import table_console
from .config_commands import ConfiguredCommand
from .finetune.command import finetune
from .launcher import launch_processes

if TYPE_CHECKING:
    from .solver_config import SolverConfig


class _TrainCommand(ConfiguredCommand):
    """Command `train`, which runs `train finetune` if its first positional argument is `finetune`.

    Options of `train finetune` may precede the word `finetune`.
    """

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Return the click context of `train finetune` or of `train`.

        It is that of `train finetune` if the first positional argument is `finetune`.

        Raises:
            click.UsageError: The first positional argument is a misspelling of `finetune`, has no
                file suffix, and is not an existing path.
        """
        options = [p for p in (*self.params, *finetune.params) if isinstance(p, click.Option)]
        with_value = {name for option in options if not option.is_flag for name in option.opts}
        words = pairwise(["", *args])
        arguments = (w for before, w in words if w[:1] != "-" and before not in with_value)
        first = next(arguments, "")
        if first == "finetune":
            args.remove("finetune")
            return finetune.make_context(f"{info_name} finetune", args, parent, **extra)
        is_path = Path(first).suffix or Path(first).exists()
        if difflib.get_close_matches(first, ["finetune"]) and not is_path:
            raise click.UsageError(f"{first!r} is unknown; did you mean `train finetune`?")
        return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that `make_context` chose: `train`, or `train finetune`."""
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)


@click.command(cls=_TrainCommand)
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

    `maskrcnn train finetune DATA` fine-tunes on your own data set, without a configuration file.
    See `maskrcnn train finetune --help`.

    CONFIG is a YAML file or the name of a preset. KEY=VALUE overrides a key of CONFIG, as in
    `solver.base_lr=0.01`, and `device=0,1` trains on two GPUs.

    With --resume, the training images and annotations must be the same as in the interrupted run,
    but may be in other folders. These keys must be the same, too: seed, solver.optimizer,
    solver.images_per_batch, all keys of the section model, and all keys of the section data except
    val, workers, on_broken, flip_probability and transforms. All other keys may change.
    """
    from .config import load_config

    if amp:
        overrides = (*overrides, "precision=fp16")
    # Mistyped keys are reported before torch is imported, because the import takes seconds.
    settings = load_config(config, overrides)

    launch_processes(settings.device, settings.processes)

    from .data.synthetic.dataset import with_synthetic_data
    from .distributed import is_main_process
    from .run import run_training
    from .stability import STABILITY_FILE, train_seeds
    from .terminal import errors_of_main_process

    if is_main_process():
        _warn_of_scaled_steps(overrides, settings.solver)
        _warn_of_late_steps(settings.solver)
    if use_synthetic_data:
        settings = with_synthetic_data(settings)
    if seeds is not None:
        with errors_of_main_process():
            stability = train_seeds(settings, seeds, resume=resume)
        if is_main_process():
            table_console().print(stability.table())
            click.echo(f"wrote all metrics to {settings.output_dir / STABILITY_FILE}")
        return
    with errors_of_main_process():
        checkpoint = run_training(settings, resume=resume)
    if is_main_process():
        from .curves import draw_curves  # slow import, because of matplotlib

        click.echo(f"the final checkpoint is {checkpoint}")
        click.echo(f"the training curves are in {draw_curves(checkpoint.parent)}")


def _warn_of_scaled_steps(overrides: Sequence[str], solver: "SolverConfig") -> None:
    """Print a warning if `overrides` set `solver.steps`, and `solver.epochs` will scale them."""
    given = {override.partition("=")[0] for override in overrides}
    if given & {"solver.steps", "solver.max_iterations"} == {"solver.steps"} and solver.epochs:
        click.echo(
            f"warning: solver.steps are scaled from solver.max_iterations={solver.max_iterations} "
            f"to the length of this run, which solver.epochs={solver.epochs:g} sets; to use "
            "unscaled steps, set solver.max_iterations instead of solver.epochs",
            err=True,
        )


def _warn_of_late_steps(solver: "SolverConfig") -> None:
    """Print a warning if the run ends before the smallest iteration in `solver.steps`.

    The learning rate then never decreases.
    """
    length = solver.max_iterations
    if solver.epochs is not None or solver.schedule != "steps" or not solver.steps:
        return
    if min(solver.steps) >= length:
        steps = sorted({round(0.7 * length), round(0.9 * length)} - {0, length})
        click.echo(
            f"warning: the learning rate does not decrease, because solver.steps begin at "
            f"{min(solver.steps)} and solver.max_iterations is {length}; "
            f"set solver.steps=[{','.join(map(str, steps))}]",
            err=True,
        )
