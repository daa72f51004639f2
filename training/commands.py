"""The verbs `train` and `eval`."""

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
        stability = train_seeds(settings, seeds, resume=resume)
        if is_main_process():
            Console().print(stability.table())
            click.echo(f"all metrics are in {settings.output_dir / STABILITY_FILE}")
        return
    checkpoint = run_training(settings, resume=resume)
    if is_main_process():
        click.echo(f"the final checkpoint is {checkpoint}")


@click.command(name="eval")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("config")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def evaluate(checkpoint: Path, config: str, overrides: tuple[str, ...]) -> None:
    """Measure the average precision of CHECKPOINT on the validation set of CONFIG.

    CONFIG and KEY=VALUE are those of `maskrcnn train`, as is `torchrun`. Detections and metrics are
    written into the folder `inference` of output_dir: bbox.json and segm.json in COCO's results
    format, predictions.pth and coco_results.pth for torch. Where the metrics fall short of
    evaluation.expected, the exit code is 1.
    """
    from .coco_metrics import IOU_TITLES, IOU_TYPES, class_table, summary_lines
    from .config import load_config
    from .distributed import is_main_process
    from .evaluation_files import FOLDER
    from .run import run_evaluation
    from .validation import check_expected

    settings = load_config(config, overrides)
    metrics = run_evaluation(checkpoint, settings)
    if is_main_process():
        for iou_type in IOU_TYPES if metrics else ():
            click.echo(f"{IOU_TITLES[iou_type]} AP and AR")
            click.echo("\n".join(summary_lines(metrics, iou_type)))
        if metrics:
            Console().print(class_table(metrics))
        click.echo(f"the files of the evaluation are in {settings.output_dir / FOLDER}")
    check_expected(settings.evaluation, metrics)
