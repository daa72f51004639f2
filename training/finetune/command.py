"""Command `maskrcnn train finetune`."""

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...model.plurals import counted
from ...plugins.runtime.console import table_console
from ..config_commands import ConfiguredCommand

if TYPE_CHECKING:
    from ..config import TrainConfig
    from ..distributed import Worker
    from .preparation import Finetuning


@click.command(cls=ConfiguredCommand)
@click.argument("data", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--dry-run", is_flag=True, help="Print the plan, but do not train.")
@click.option(
    "--resume", is_flag=True, help="Resume the run in output_dir. If it has no run, start one."
)
def finetune(data: Path, overrides: tuple[str, ...], dry_run: bool, resume: bool) -> None:
    """Fine-tune a model on the data set DATA.

    DATA is a folder in the layout of COCO, Roboflow, CVAT, LabelMe or YOLO (with polygons), the
    YAML file of a YOLO data set, or a COCO file with its images in the same folder or below. If the
    data set has no validation split, 10 % of the training images are held out for validation.

    Training starts from weights trained on COCO. To start from other weights, set weights=PATH or
    the name of a published model, as in weights=detectron2:mask_rcnn_R_50_FPN_3x. weights=null
    means random weights. Schedule, learning rate, batch size and input size are fitted to the data
    and the machine. KEY=VALUE overrides a key, and the other keys are fitted to it.
    """
    if dry_run and resume:
        raise click.UsageError("--dry-run cannot be combined with --resume; omit one of them")

    from .overrides import given_values, output_folder, resumed_config

    # Mistyped keys are reported before torch is imported, because the import takes seconds.
    given = given_values(data, overrides)
    output = output_folder(data, given)

    from ..devices import device_from
    from ..launcher import launch_processes
    from ..run_folder import RunFolder
    from .preparation import prepare_finetuning, resumed_data

    config = None
    if resume and RunFolder(output).contains_run():
        config = resumed_config(output, overrides, given)
        config = config.model_copy(update={"data": resumed_data(data, config)})
        device, processes = config.device, config.processes
    else:
        device, processes = device_from(given.get("device", "auto")), given.get("processes")
    launch_processes(device, processes)

    from ..distributed import worker
    from ..evaluation.validation import check_expected
    from ..run import train
    from ..terminal import errors_of_main_process

    with errors_of_main_process():
        with worker(device) as rank, ExitStack() as lock:
            if config is None:
                prepared = prepare_finetuning(data, overrides, given, output, rank, lock)
                config = prepared.config
                if rank.is_main:
                    _print_plan(data, prepared)
                _check_plan(prepared, rank)
                if dry_run:
                    return
                prepared.splits.write()
                del prepared  # the annotations of a large data set take gigabytes
            checkpoint, metrics = train(config, rank, resume=resume)
        check_expected(config.evaluation, metrics)
    if rank.is_main:
        _print_results(checkpoint, config)


def _check_plan(prepared: "Finetuning", rank: "Worker") -> None:
    """Check the configuration as a training does at its start, but before annotations are written.

    Raises:
        ConfigError: The configuration does not fit the data or the machine, or a tracker is not
            installed.
    """
    from ..classes import set_classes_from_dataset
    from ..evaluation.validation import check_evaluation
    from ..tracking import check_trackers
    from ..trainer import check_precision

    config = prepared.config
    check_precision(config, rank.device)
    check_trackers(config.trackers)
    set_classes_from_dataset(prepared.train, config)
    check_evaluation(config, prepared.val)


def _print_plan(data: Path, prepared: "Finetuning") -> None:
    from ..data.coco.categories import similar_names

    click.echo(f"{data}: {prepared.layout.name}")
    click.echo(prepared.splits.description)
    for split in (prepared.splits.train, prepared.splits.val):
        if split is not None:
            click.echo(f"annotations {split.annotations} of the images in {split.images}")
    for text in prepared.left_out:
        click.echo(text, err=True)
    names = [category.name for category in prepared.train.categories]
    classes = counted(len(names), "class", "classes")
    click.echo(f"{prepared.train_description}; {classes}: {', '.join(names)}")
    for similar in similar_names(names):
        click.echo(f"class names differ only in case or blanks: {similar}", err=True)
    if prepared.replaced_predictors:
        own = counted(prepared.start.model_config.num_classes, "class", "classes")
        click.echo(
            f"the weights have {own}, but the data set has {classes}, so these layers start from "
            "random weights: "
            f"{', '.join(prepared.replaced_predictors)}"
        )
    table_console().print(prepared.table())


def _print_results(checkpoint: Path, config: "TrainConfig") -> None:
    from ...model.checkpoint import load_checkpoint
    from ..curves import draw_curves
    from ..data.coco.dataset import CocoDataset
    from ..evaluation.coco_curves import IOU_TYPES
    from ..evaluation.coco_metrics import IOU_TITLES, class_table, metric_text
    from ..evaluation.matching import DEFAULT_THRESHOLD, matched_images
    from ..evaluation.result_files import RESULTS_FOLDER, read_mask_results
    from ..evaluation.worst_images import draw_worst_images
    from .preparation import next_commands

    metrics = load_checkpoint(checkpoint).metrics
    if metrics:
        table_console().print(class_table(metrics))
    for iou_type in IOU_TYPES if metrics else ():
        names = ("AP", "AP50", "AP75")
        values = (f"{name} {metric_text(metrics[f'{iou_type}/{name}'])}" for name in names)
        click.echo(f"{IOU_TITLES[iou_type]}: {', '.join(values)}")
    click.echo(f"the final checkpoint is {checkpoint}")
    click.echo(f"the training curves are in {draw_curves(checkpoint.parent)}")
    if metrics and config.data.val is not None:
        dataset, worst = CocoDataset(config.data.val), checkpoint.with_name("worst.png")
        results = read_mask_results(checkpoint.parent / RESULTS_FOLDER, dataset)
        thresholds = [DEFAULT_THRESHOLD] * len(dataset.categories)
        images = matched_images(dataset, results)
        drawn = draw_worst_images(images, dataset.categories, thresholds, worst)
        click.echo(
            f"validation images with the most errors: {worst}"
            if drawn
            else "no validation image has an error"
        )
    click.echo("next:")
    for command in next_commands(checkpoint, (config.data.val or config.data.train).images):
        click.echo(f"  {command}")
