"""`maskrcnn eval`: average precision of a checkpoint or a bundle."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from ...model.bundle.manifest import MANIFEST_NAME, Precision
from ...model.config.option_types import HTML_FILE, JSON_FILE, OUTPUT_FOLDER
from ...model.plurals import counted
from ...model.shell_commands import shell_path
from ...serving.config import BackendName
from ...training.config import EvaluatorName
from ...training.solver_config import MAX_BATCH

if TYPE_CHECKING:
    from .measure import BundleEvaluation, ValidationSet

# Options that apply only to a bundle.
_BUNDLE_OPTIONS = ("images", "annotations", "backend", "precision", "output")
# Key of the configuration section `evaluation` that each option sets.
_KEYS = {"evaluator": "evaluator", "batch": "images_per_batch"}


@click.command(name="eval")
@click.argument("model")
@click.argument("data", required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--images", type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder of images. Give it together with --annotations, instead of DATA.",
)  # fmt: skip
@click.option(
    "--annotations", type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="COCO instances file of the images in --images.",
)  # fmt: skip
@click.option(
    "--backend", type=click.Choice(get_args(BackendName)),
    help="Backend of a bundle. Default: as `maskrcnn serve` selects it.",
)  # fmt: skip
@click.option(
    "--precision", type=click.Choice(get_args(Precision)),
    help="Precision of a bundle. Default: as `maskrcnn serve` selects it.",
)  # fmt: skip
@click.option(
    "--batch", type=click.IntRange(1, MAX_BATCH),
    help="Maximum images per batch; sets evaluation.images_per_batch.",
)  # fmt: skip
@click.option(
    "--evaluator", type=click.Choice(get_args(EvaluatorName)),
    help="Library that computes the metrics; sets evaluation.evaluator.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=OUTPUT_FOLDER,
    help="Folder for the result files of a bundle. Default: they are not written.",
)  # fmt: skip
@click.option(
    "--report", type=HTML_FILE, metavar="FILE.html",
    help="Also write a report: precision-recall curves, confusion matrix, best score threshold of "
    "each class, images with the most errors.",
)  # fmt: skip
@click.option(
    "--json", "json_path", type=JSON_FILE,
    help="Also write the metrics to this file.",
)  # fmt: skip
def evaluate(
    model: str, data: str | None, overrides: tuple[str, ...], json_path: Path | None, **options: Any
) -> None:
    """Measure the average precision of a checkpoint or a bundle.

    `maskrcnn eval CHECKPOINT CONFIG [KEY=VALUE]...` evaluates a checkpoint on data.val of CONFIG.
    CONFIG is a configuration file or the name of a preset, and KEY=VALUE changes one of its keys,
    as for `maskrcnn train`. `torchrun` can start this command too. The checkpoint defines the
    model, and the section `model` of CONFIG is ignored. KEY=VALUE can change keys of the
    checkpoint's model that affect only inference, such as model.roi.score_threshold. The result
    files are written to the folder `inference` in output_dir.

    CHECKPOINT can also be weights of another implementation, or a name that `maskrcnn weights list`
    prints.

    `maskrcnn eval BUNDLE DATA` evaluates a bundle (exported model) with the server's backends.
    DATA is a data set folder in the layout of COCO, Roboflow, CVAT, LabelMe or YOLO, as for
    `maskrcnn train finetune`. Its split `val`, or its only split, is used. For any other image
    folder with a COCO annotation file, give --images and --annotations instead of DATA. DATA can
    also be CONFIG [KEY=VALUE]... as above. Then only data.val, data.on_broken,
    data.exif_orientation and the section `evaluation` of CONFIG are used.

    If a checkpoint is given with a data set folder, --images, --annotations, --backend, --precision
    or -o, the checkpoint is first exported to a bundle in the cache folder, and this bundle is
    evaluated. Later evaluations reuse the bundle.

    The result files are bbox.json and segm.json in COCO's results format, and predictions.pth and
    coco_results.pth, which torch.load reads. If a metric is below evaluation.expected, the exit
    code is 1.
    """
    if data is not None and _is_model(Path(data)):
        raise click.UsageError(
            f"{data} is a model, not a data set; give the model first, and the data set after it"
        )
    if data is not None and _is_annotation_file(Path(data)):
        raise click.UsageError(
            f"DATA is a data set folder or a configuration, but {data} is an annotation file; give "
            f"--images FOLDER --annotations {shell_path(Path(data))} instead"
        )
    given = {name: value for name, value in options.items() if value is not None}
    as_bundle = Path(model).is_dir() or not given.keys().isdisjoint(_BUNDLE_OPTIONS)
    if as_bundle or (data is not None and _is_folder(data)):
        _evaluate_bundle(model, data, overrides, given, json_path)
    else:
        _evaluate_checkpoint(model, data, overrides, given, json_path)


def _is_annotation_file(path: Path) -> bool:
    """Return whether a path is a COCO file. A configuration can be a JSON file, too."""
    if path.suffix != ".json" or not path.is_file():
        return False
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return False
    return isinstance(content, dict) and {"images", "annotations"} <= content.keys()


def _evaluate_checkpoint(
    reference: str,
    source: str | None,
    overrides: tuple[str, ...],
    given: Mapping[str, Any],
    json_path: Path | None,
) -> None:
    from ...model.weights.references import checkpoint_from_reference
    from ...training.config_sources import presets
    from ...training.distributed import worker
    from ...training.evaluation.config import load_evaluation_config
    from ...training.evaluation.result_files import RESULTS_FOLDER
    from ...training.evaluation.validation import check_expected
    from ...training.run import evaluate_loaded
    from ...training.terminal import errors_of_main_process

    if source is None:
        raise click.UsageError(
            "the data set is missing; after the checkpoint, give CONFIG (a configuration file or a "
            "preset, whose data.val is evaluated) or the folder of a data set"
        )
    if source not in presets() and not Path(source).exists():
        raise click.UsageError(
            f"{source!r} does not exist; give the folder of a data set, a configuration file, or "
            "the name of a preset"
        )
    loaded = checkpoint_from_reference(reference)
    config = load_evaluation_config(source, (*overrides, *_overrides_from(given)), loaded)
    for dataset in (config.data.val, config.data.train, *config.data.extra_train):
        if dataset is not None:
            _check_json(json_path, dataset.annotations)
    with worker(config.device) as own:
        metrics = evaluate_loaded(loaded, config, own, given.get("report"))
        if own.is_main:
            _print_metrics(metrics)
            click.echo(f"the result files are in {config.output_dir / RESULTS_FOLDER}")
            _name_report(given)
            _write_json(json_path, {"checkpoint": reference, "metrics": metrics})
        # Wait until the main process has printed. If another process failed in `check_expected`
        # before that, torchrun would kill the main process at once.
        own.wait_for_ranks()
    with errors_of_main_process():
        check_expected(config.evaluation, metrics)


def _evaluate_bundle(
    reference: str,
    source: str | None,
    overrides: tuple[str, ...],
    given: Mapping[str, Any],
    json_path: Path | None,
) -> None:
    from dataclasses import asdict

    from ...model.weights.references import checkpoint_from_reference
    from ...serving.commands.options import bundle_for_backend
    from ...training.data.coco.categories import with_ids_of
    from ...training.evaluation.validation import check_expected
    from .measure import evaluate_bundle

    data = _validation_set_from(source, overrides, given)
    _check_json(json_path, data.dataset.config.annotations)

    def check_classes() -> None:
        with_ids_of(data.dataset, checkpoint_from_reference(reference).categories)

    precisions = (given["precision"],) if "precision" in given else ()
    # Check the classes before the export, which takes a minute. `evaluate_bundle` would find a
    # mismatch only after it.
    bundle = bundle_for_backend(
        reference, given.get("backend", "auto"), precisions, before_export=check_classes
    )
    names = ("backend", "precision", "output", "report")
    options = {name: given[name] for name in names if name in given}
    evaluation = evaluate_bundle(bundle, data, **options)
    _print_metrics(evaluation.metrics)
    click.echo(_describe_evaluation(evaluation))
    if "output" in given:
        click.echo(f"the result files are in {given['output']}")
    _name_report(given)
    rate = {"images_per_second": evaluation.images_per_second}
    _write_json(json_path, {"bundle": str(bundle), **asdict(evaluation), **rate})
    check_expected(data.settings, evaluation.metrics)


def _validation_set_from(
    source: str | None, overrides: tuple[str, ...], given: Mapping[str, Any]
) -> "ValidationSet":
    """Return the validation set that the command line names.

    Args:
        source: argument DATA: a data set folder or a configuration. None: use the options --images
            and --annotations in `given`.
        overrides: KEY=VALUE arguments. They are valid only if `source` is a configuration.
        given: values of the options on the command line, by parameter name.
    """
    from ...training.config import EvaluationConfig
    from ...training.data.convert.layouts import LayoutSplit, find_validation_split
    from .measure import ValidationSet

    if (source is not None, "images" in given, "annotations" in given) not in (
        (True, False, False),
        (False, True, True),
    ):
        raise click.UsageError("give either DATA, or both --images and --annotations")
    if source is None:
        split = LayoutSplit(given["images"], given["annotations"])
    elif _is_folder(source):
        split = find_validation_split(Path(source))
    else:
        return _validation_set_of_config(source, overrides, given)
    if overrides:
        raise click.UsageError(
            f"the override {overrides[0]} needs a configuration; give a configuration file or a "
            "preset as DATA"
        )
    keys = {key: given[name] for name, key in _KEYS.items() if name in given}
    return ValidationSet(split.load(), EvaluationConfig(**keys))


def _validation_set_of_config(
    source: str, overrides: tuple[str, ...], given: Mapping[str, Any]
) -> "ValidationSet":
    from ...training.config import ConfigError, validated_config
    from ...training.config_sources import presets
    from ...training.data.coco.dataset import CocoDataset
    from .measure import ValidationSet

    if source not in presets() and not Path(source).is_file():
        raise ConfigError(
            f"{source} is neither a folder nor a configuration file nor a preset; give one of "
            "these as DATA"
        )
    for key in (override.partition("=")[0] for override in overrides):
        if not re.match(r"(data\.val|data\.on_broken|data\.exif_orientation|evaluation)\b", key):
            raise ConfigError(
                f"{key} does not apply to a bundle, because the model and its input sizes were "
                "fixed at export; set only keys of data.val, data.on_broken, data.exif_orientation "
                "or evaluation"
            )
    config = validated_config(source, (*overrides, *_overrides_from(given)))
    data = config.data
    if data.val is None:
        raise ConfigError(
            f"{source} has no validation set; set data.val.images and data.val.annotations"
        )
    dataset = CocoDataset(data.val, data.on_broken)
    return ValidationSet(dataset, config.evaluation, data.on_broken, data.exif_orientation)


def _overrides_from(given: Mapping[str, Any]) -> list[str]:
    return [f"evaluation.{key}={given[name]}" for name, key in _KEYS.items() if name in given]


def _is_model(path: Path) -> bool:
    return path.suffix == ".pth" or (path / MANIFEST_NAME).is_file()


def _is_folder(source: str) -> bool:
    from ...training.config_sources import presets

    return source not in presets() and Path(source).is_dir()


def _describe_evaluation(evaluation: "BundleEvaluation") -> str:
    images = counted(evaluation.images, "image")
    if evaluation.left_out:
        images += f" ({evaluation.left_out} skipped)"
    return (
        f"{images} in {evaluation.seconds:.1f} s: {evaluation.images_per_second:.1f} images/s in "
        f"{evaluation.precision} with {evaluation.backend} on {evaluation.device}, in batches of "
        f"up to {evaluation.max_batch}"
    )


def _print_metrics(metrics: dict[str, float]) -> None:
    from ...plugins.runtime.console import table_console
    from ...training.evaluation.coco_curves import IOU_TYPES
    from ...training.evaluation.coco_metrics import IOU_TITLES, class_table, summary_lines

    if not metrics:
        return
    for iou_type in IOU_TYPES:
        click.echo(f"{IOU_TITLES[iou_type]} AP and AR")
        click.echo("\n".join(summary_lines(metrics, iou_type)))
    table_console().print(class_table(metrics))
    if metrics["bbox/AP"] == -1:
        click.echo(
            "the metrics are -1 because the evaluated images have no annotated objects; check the "
            "annotations",
            err=True,
        )


def _name_report(given: Mapping[str, Any]) -> None:
    if "report" in given:
        click.echo(f"the report is {given['report']}")


def _check_json(path: Path | None, annotations: Path) -> None:
    """Raise a usage error if the option --json would overwrite an annotation file."""
    if path is not None and path.exists() and annotations.exists() and path.samefile(annotations):
        raise click.UsageError(f"--json {path} is an annotation file; choose another name")


def _write_json(path: Path | None, content: Mapping[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n")
        click.echo(f"the metrics are in {path}")
