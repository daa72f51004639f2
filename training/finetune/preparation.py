"""Prepare a fine-tuning: detect the layout of the data set, and fit a configuration to it."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.table import Table
from rich.text import Text

from ...model.checkpoint import Checkpoint
from ...model.config.error_messages import validation_message
from ...model.config.overrides import with_overrides
from ...model.config.reference import text_from_value
from ...model.plurals import counted
from ...model.shell_commands import shell_path
from ...model.weights.layouts import CLASS_ROWS
from ..config import ConfigError, DataConfig, DatasetConfig, TrainConfig, check_length
from ..data.coco.categories import check_categories
from ..data.coco.dataset import CocoDataset, DataError, ImageRecord, summary_of
from ..data.coco.training_set import left_out_message
from ..data.convert.conversion import coco_json
from ..data.convert.layouts import DataLayout, recognize_layout
from ..data.inspect.file_checks import misfit_files, read_headers
from ..distributed import Worker
from ..run_folder import RunFolder
from .initial_weights import DEFAULT_WEIGHTS, initial_checkpoint
from .machine import common_machine
from .plan import ImageStatistics, plan_finetuning
from .splits import ChosenSplits, choose_splits

# Folder in `output_dir` for annotations that are converted or divided into training and validation.
_DATA_FOLDER = "data"
# Configuration keys in the printed plan.
_SHOWN = (
    "output_dir",
    "weights",
    "device",
    "precision",
    "model.rpn.post_nms_top_n_test",
    "data.min_size",
    "data.max_size",
    "data.buckets",
    "solver.images_per_batch",
    "solver.base_lr",
    "solver.max_iterations",
    "solver.steps",
    "solver.warmup_iterations",
    "checkpoint_period",
)


@dataclass(frozen=True, slots=True)
class Finetuning:
    """Prepared fine-tuning: data set, initial model, and the configuration fitted to both."""

    layout: DataLayout
    splits: ChosenSplits
    config: TrainConfig
    # Reasons for the values of `config`, by dotted key.
    reasons: Mapping[str, str]
    train: CocoDataset
    # None: there is only one image.
    val: CocoDataset | None
    # Unusable files of training images with objects: the path of each file, with the reason.
    unusable: tuple[str, ...]
    # Unusable files of validation images, with or without objects: path with reason.
    unusable_val: tuple[str, ...]
    # Model and preprocessing of the initial weights.
    start: Checkpoint

    @property
    def train_description(self) -> str:
        """Text with the numbers of images to train on, and of images without objects."""
        empty = sum(not record.objects for record in self.train.records)
        usable = len(self.train) - len(self.unusable)
        text = counted(usable, "training image")
        if not empty:
            return text
        if self.config.data.keep_empty:
            return f"{text}, {empty} of them without objects"
        return f"{counted(usable - empty, 'training image')}; {left_out_message(empty)}"

    @property
    def left_out(self) -> list[str]:
        """Messages about the annotations and files that are left out, with the reasons."""
        findings = {
            "left out": self.splits.faults,
            "left out of training": _with_files(self.train.faults, self.unusable),
            "left out of validation": _with_files(
                self.val.faults if self.val else {}, self.unusable_val
            ),
        }
        return [f"{where}: {summary_of(faults)}" for where, faults in findings.items() if faults]

    @property
    def replaced_predictors(self) -> tuple[str, ...]:
        """Names of layers that start from random weights, because the number of classes differs.

        The tuple is empty if the initial weights have the data set's number of classes, are those
        of a backbone only, or are random.
        """
        if self.config.weights is None or not self.start.categories:
            return ()
        if self.start.model_config.num_classes == len(self.train.categories):
            return ()
        return tuple(dict.fromkeys(name.rpartition(".")[0] for name in CLASS_ROWS))

    def table(self) -> Table:
        """Return a table of the most important configuration keys, their values and the reasons."""
        title = "plan; set other values with KEY=VALUE"
        table = Table(title=title, title_justify="left")
        table.add_column("key", no_wrap=True)
        table.add_column("value", overflow="fold")
        table.add_column("because")
        for key in _SHOWN:
            value = text_from_value(attrgetter(key)(self.config))
            table.add_row(key, Text(value), Text(self.reasons.get(key, "")))
        return table


def prepare_finetuning(
    path: Path,
    overrides: Sequence[str],
    given: Mapping[str, Any],
    output: Path,
    worker: Worker,
    lock: ExitStack,
) -> Finetuning:
    """Recognise the layout of a data set, and fit the configuration of a fine-tuning to the data.

    Every rank must call this function. All ranks get the same configuration.

    Annotations that must be converted to COCO format, or divided into training and validation, get
    files in the folder `output/data`. `splits.write` of the result writes these files.

    Args:
        path: Folder of a data set, YAML file of a YOLO data set, or COCO annotation file.
        overrides: Values of `TrainConfig` that the user sets, as `key.path=value`. All other values
            are fitted to them.
        given: The values in `overrides` by dotted key, such as "solver.base_lr".
        output: Folder of the run to prepare. It must not contain a run.
        worker: Rank and device of this process.
        lock: Stack to which rank 0 adds the lock of `output`. Close the stack only when the
            training has ended, so that no other process replaces the annotations of the run.

    Raises:
        DataError: The layout is unknown, or the data set is unusable.
        ConfigError: An override is invalid, `output` contains a run or is a file, or another
            process trains in it. Or annotations would have to be written to `output/data`, but the
            data set itself is there. Or the training set lacks a category of the validation set.
        CheckpointError: The initial weights cannot be read.
        ZooError: The published model that the setting `weights` names does not exist, or is not
            supported.
        DownloadError: The download of the initial weights failed.
    """
    layout = recognize_layout(path)
    folder = RunFolder(output)
    folder.open(resume=False)
    if worker.is_main:
        lock.enter_context(folder.locked())
    else:  # rank 0 writes first, because it holds the lock
        worker.wait_for_ranks()
    try:
        splits = choose_splits(layout, output / _DATA_FOLDER)
    finally:
        if worker.is_main:
            worker.wait_for_ranks()
    try:
        train, val = _read_splits(splits)
        records, unusable = _usable_records(train, _records_with_objects(train))
        _, unusable_val = _usable_records(val, val.records) if val else ([], ())
    except DataError as error:
        left_out = f"; left out: {summary_of(splits.faults)}" if splits.faults else ""
        inspect = f"maskrcnn data inspect {shell_path(path)}"
        raise DataError(f"{path}: {error}{left_out}; run `{inspect}` for details") from None
    weights = given.get("weights", DEFAULT_WEIGHTS)
    start = initial_checkpoint(None if weights is None else str(weights))
    machine = common_machine(worker)
    statistics = ImageStatistics.of(records)
    plan = plan_finetuning(statistics, start, machine, given, is_pretrained=weights is not None)
    values: dict[str, Any] = {**plan.values, "weights": weights, "output_dir": str(output)}
    paths = {"train": splits.train, "val": splits.val}
    values["data"] |= {k: v and v.model_dump(mode="json") for k, v in paths.items()}
    reasons = plan.reasons | dict.fromkeys(given, "as set")
    config = _config(values, overrides)
    return Finetuning(layout, splits, config, reasons, train, val, unusable, unusable_val, start)


def resumed_data(path: Path, config: TrainConfig) -> DataConfig:
    """Check that a run was trained on the data set at `path`, and return the run's section `data`.

    If the data set was moved, or the paths in this section are relative to another working
    directory, the image folders do not exist. Their paths and those of the annotations are then
    replaced by the current ones.

    Args:
        path: Path of the data set.
        config: Configuration of the run.

    Raises:
        ConfigError: The run was trained on images in another folder that still exists, or the
            annotations have changed since `prepare_finetuning` wrote them to `output_dir/data`.
        DataError: The layout of the data set is unknown, or the data set is incomplete.
    """
    layout = recognize_layout(path)
    folders = {split.images.resolve() for split in layout.splits.values()}
    images = config.data.train.images
    if images.exists() and images.resolve() not in folders:
        raise ConfigError(
            f"{config.output_dir} holds a training run on the images in {images}, not on {path}; "
            "resume the run with its own data set, or choose another folder with output_dir=FOLDER"
        )
    splits = choose_splits(layout, config.output_dir / _DATA_FOLDER)
    for used, new in splits.converted.items():
        if used.is_file() and used.read_bytes() != coco_json(new):
            raise ConfigError(
                f"the annotations of {path} have changed since the run began: they differ from "
                f"those in {used}, which the run uses; restore the data, or start a new run "
                "from the checkpoint with weights=FILE output_dir=FOLDER"
            )
    present = {}
    for key, split in (("train", splits.train), ("val", splits.val)):
        old: DatasetConfig | None = getattr(config.data, key)
        if old is not None and split is not None and not old.images.exists():
            present[key] = old.model_copy(update=dict(split))
    return config.data.model_copy(update=present)


def next_commands(checkpoint: Path, images: Path) -> tuple[str, ...]:
    """Return the commands that export, run and serve a trained model.

    `images` is the folder from which the export copies sample images into the exported bundle.
    """
    model, bundle, samples = (
        shell_path(path) for path in (checkpoint, checkpoint.parent / "bundle", images)
    )
    return (
        f"maskrcnn export {model} -o {bundle} --samples {samples}",
        f"maskrcnn predict {bundle} IMAGE_OR_FOLDER -o predicted",
        f"maskrcnn serve {bundle} --port 8500 --http-port 8080",
    )


def _read_splits(splits: ChosenSplits) -> tuple[CocoDataset, CocoDataset | None]:
    # Suppress warnings about invalid entries, because the printed plan lists them.
    with _no_warnings():
        train = _read(splits.train, splits)
        val = _read(splits.val, splits) if splits.val is not None else None
    if val is not None:
        check_categories(val, train.categories)
    return train, val


def _read(config: DatasetConfig, splits: ChosenSplits) -> CocoDataset:
    return CocoDataset(config, source=splits.converted.get(config.annotations))


def _records_with_objects(dataset: CocoDataset) -> list[ImageRecord]:
    """Return the images with objects.

    Raises:
        DataError: No image has objects.
    """
    records = [record for record in dataset.records if record.objects]
    if not records:
        faults = f": {summary_of(dataset.faults)}" if dataset.faults else ""
        raise DataError(f"{dataset.name} has no image with an annotated object{faults}")
    return records


def _usable_records(
    dataset: CocoDataset, records: Sequence[ImageRecord]
) -> tuple[list[ImageRecord], tuple[str, ...]]:
    """Return the records with usable image files, and the paths of unusable files with reasons.

    A file is usable if its header can be read and states the annotated size, and this size is
    within the limits of `check_size`.

    Raises:
        DataError: No file is usable.
    """
    found = misfit_files(records, read_headers(records))
    misfits = {misfit.record.id: misfit.subject for misfit in found}
    usable = [record for record in records if record.id not in misfits]
    if not usable:
        first = next(iter(misfits.values()))
        raise DataError(
            f"{dataset.name} lists no usable image file; the first unusable file is {first}"
        )
    return usable, tuple(misfits.values())


def _with_files(
    faults: Mapping[str, Sequence[str]], files: Sequence[str]
) -> dict[str, Sequence[str]]:
    return {**faults, "image files": files} if files else {**faults}


def _config(values: dict[str, Any], overrides: Sequence[str]) -> TrainConfig:
    try:
        config = TrainConfig.model_validate(with_overrides(values, overrides))
    except ValidationError as error:
        raise ConfigError(validation_message(error, TrainConfig)) from None
    check_length(config, overrides)
    return config


@contextmanager
def _no_warnings() -> Iterator[None]:
    package = logging.getLogger(__name__.partition(".")[0])
    handler = logging.NullHandler()
    package.addHandler(handler)
    try:
        yield
    finally:
        package.removeHandler(handler)
