"""The verbs `train` and `eval`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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

    if amp:
        overrides = (*overrides, "precision=fp16")
    settings = load_config(config, overrides)
    if use_synthetic_data:
        settings = with_synthetic_data(settings)
    if seeds is not None:
        with _said_once():
            stability = train_seeds(settings, seeds, resume=resume)
        if is_main_process():
            Console().print(stability.table())
            click.echo(f"all metrics are in {settings.output_dir / STABILITY_FILE}")
        return
    with _said_once():
        checkpoint = run_training(settings, resume=resume)
    if is_main_process():
        click.echo(f"the final checkpoint is {checkpoint}")


@click.command(name="eval")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def evaluate(checkpoint: Path, config: str, overrides: tuple[str, ...]) -> None:
    """Measure the average precision of CHECKPOINT on the validation set of CONFIG.

    CONFIG and KEY=VALUE are those of `maskrcnn train`, as is `torchrun`, but the model is the
    checkpoint's: the section `model` of CONFIG is not read, and KEY=VALUE sets only those keys of
    it that change no parameters, such as model.roi.score_threshold. Detections and metrics are
    written into the folder `inference` of output_dir: bbox.json and segm.json in COCO's results
    format, predictions.pth and coco_results.pth for torch. Where the metrics fall short of
    evaluation.expected, the exit code is 1.
    """
    from ..model.checkpoint import load_checkpoint
    from .distributed import worker
    from .evaluation_config import load_evaluation_config
    from .run import evaluate_checkpoint
    from .validation import check_expected

    loaded = load_checkpoint(checkpoint)
    settings = load_evaluation_config(config, overrides, loaded)
    with worker(settings.device) as own:
        metrics = evaluate_checkpoint(loaded, settings, own)
        if own.is_main:
            _print_evaluation(metrics, settings.output_dir)
        # Where one process fails, torchrun ends the others at once, also one that still prints.
        own.wait_for_ranks()
    with _said_once():
        check_expected(settings.evaluation, metrics)


def _print_evaluation(metrics: dict[str, float], output_dir: Path) -> None:
    from .coco_metrics import IOU_TITLES, IOU_TYPES, class_table, summary_lines
    from .evaluation_files import FOLDER

    for iou_type in IOU_TYPES if metrics else ():
        click.echo(f"{IOU_TITLES[iou_type]} AP and AR")
        click.echo("\n".join(summary_lines(metrics, iou_type)))
    if metrics:
        Console().print(class_table(metrics))
    click.echo(f"the files of the evaluation are in {output_dir / FOLDER}")


@contextmanager
def _said_once() -> Iterator[None]:
    """Leave it to the first process to say what all of them find alike; the others only fail."""
    from .distributed import is_main_process
    from .reporting import DivergenceError
    from .validation import ExpectationError

    try:
        yield
    except (DivergenceError, ExpectationError):
        if is_main_process():
            raise
        raise SystemExit(1) from None
