"""The verb `eval`: of a checkpoint, or of a bundle."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from .model.manifest import Precision
from .serving.config import BackendName
from .training.config import EvaluatorName

if TYPE_CHECKING:
    from .bundle_evaluation import BundleEvaluation, ValidationSet

_OF_BUNDLES = ("images", "annotations", "backend", "precision", "output")
_KEYS = {"evaluator": "evaluator", "batch": "images_per_batch"}
"""Options that are short for a key of the section `evaluation`."""


@click.command(name="eval")
@click.argument("model", type=click.Path(path_type=Path))
@click.argument("data", required=False)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--images",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Folder of the images, in place of DATA.",
)
@click.option(
    "--annotations",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="COCO instances file that belongs to --images.",
)
@click.option(
    "--backend",
    type=click.Choice(get_args(BackendName)),
    help="What runs a bundle; the default is the fastest that it has artefacts for.",
)
@click.option(
    "--precision",
    type=click.Choice(get_args(Precision)),
    help="Which of a bundle's; the default is the backend's first.",
)
@click.option(
    "--batch",
    type=click.IntRange(1),
    help="Images a batch at most; short for evaluation.images_per_batch.",
)
@click.option(
    "--evaluator",
    type=click.Choice(get_args(EvaluatorName)),
    help="What computes the metrics; short for evaluation.evaluator.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the files of a bundle's evaluation; without it they are not written.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the metrics to this file too.",
)
def evaluate(
    model: Path,
    data: str | None,
    overrides: tuple[str, ...],
    json_path: Path | None,
    **options: Any,
) -> None:
    """Measure the average precision of a checkpoint or a bundle.

    `maskrcnn eval CHECKPOINT CONFIG [KEY=VALUE]...` measures on data.val of CONFIG. The words are
    those of `maskrcnn train`, as is `torchrun`, but the model is the checkpoint's: the section
    `model` of CONFIG is not read, and KEY=VALUE sets only those keys of it that change no
    parameters, such as model.roi.score_threshold. The files of the evaluation are written into the
    folder `inference` of output_dir.

    `maskrcnn eval BUNDLE DATA` measures what will be served. DATA is a folder as `maskrcnn data
    inspect` takes it, whose split `val`, or only split, is used; --images and --annotations name
    any other. Or it is CONFIG [KEY=VALUE]..., of which data.val, data.on_broken and the section
    `evaluation` are used.

    The files are bbox.json and segm.json in COCO's results format, predictions.pth and
    coco_results.pth for torch. Where the metrics fall short of evaluation.expected, the exit code
    is 1.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if model.is_dir():
        _evaluate_bundle(model, data, overrides, given, json_path)
    else:
        _evaluate_checkpoint(model, data, overrides, given, json_path)


def _evaluate_checkpoint(
    checkpoint: Path,
    source: str | None,
    overrides: tuple[str, ...],
    given: Mapping[str, Any],
    json_path: Path | None,
) -> None:
    from .model.checkpoint import load_checkpoint
    from .training.distributed import worker
    from .training.evaluation_config import load_evaluation_config
    from .training.evaluation_files import FOLDER
    from .training.run import evaluate_checkpoint
    from .training.terminal import said_once
    from .training.validation import check_expected

    for name in _OF_BUNDLES:
        if name in given:
            raise click.UsageError(f"--{name} is for a bundle, and {checkpoint} is no folder")
    if source is None or _is_folder(source):
        raise click.UsageError(
            "a checkpoint is measured with a configuration, whose data.val names the data; give "
            "CONFIG after it"
        )
    loaded = load_checkpoint(checkpoint)
    config = load_evaluation_config(source, (*overrides, *_overrides_from(given)), loaded)
    with worker(config.device) as own:
        metrics = evaluate_checkpoint(loaded, config, own)
        if own.is_main:
            _print_metrics(metrics)
            click.echo(f"the files of the evaluation are in {config.output_dir / FOLDER}")
            _write_json(json_path, {"checkpoint": str(checkpoint), "metrics": metrics})
        # Where one process fails, torchrun ends the others at once, also one that still prints.
        own.wait_for_ranks()
    with said_once():
        check_expected(config.evaluation, metrics)


def _evaluate_bundle(
    bundle: Path,
    source: str | None,
    overrides: tuple[str, ...],
    given: Mapping[str, Any],
    json_path: Path | None,
) -> None:
    from dataclasses import asdict

    from .bundle_evaluation import evaluate_bundle
    from .training.validation import check_expected

    data = _validation_set_from(source, overrides, given)
    options = {name: given[name] for name in ("backend", "precision", "output") if name in given}
    evaluation = evaluate_bundle(bundle, data, **options)
    _print_metrics(evaluation.metrics)
    click.echo(_sentence_from(evaluation))
    if "output" in given:
        click.echo(f"the files of the evaluation are in {given['output']}")
    rate = {"images_per_second": evaluation.images_per_second}
    _write_json(json_path, {"bundle": str(bundle), **asdict(evaluation), **rate})
    check_expected(data.settings, evaluation.metrics)


def _validation_set_from(
    source: str | None, overrides: tuple[str, ...], given: Mapping[str, Any]
) -> "ValidationSet":
    """What the words on the command line name.

    Raises:
        UsageError: they do not go together.
        ConfigError: the configuration is not valid, or names no validation set.
        DataError: the folder has no split to use.
    """
    from .bundle_evaluation import ValidationSet
    from .training.config import DatasetConfig, EvaluationConfig
    from .training.data.layout import find_validation_split

    if (source is not None, "images" in given, "annotations" in given) not in (
        (True, False, False),
        (False, True, True),
    ):
        raise click.UsageError("give either DATA, or both --images and --annotations")
    if source is None:
        dataset = DatasetConfig(images=given["images"], annotations=given["annotations"])
    elif _is_folder(source):
        dataset = find_validation_split(Path(source))
    else:
        return _configured_set(source, overrides, given)
    if overrides:
        raise click.UsageError(f"{overrides[0]} goes with a configuration, but DATA is a folder")
    keys = {key: given[name] for name, key in _KEYS.items() if name in given}
    return ValidationSet(dataset, EvaluationConfig(**keys))


def _configured_set(
    source: str, overrides: tuple[str, ...], given: Mapping[str, Any]
) -> "ValidationSet":
    from .bundle_evaluation import ValidationSet
    from .training.config import ConfigError, validated_config
    from .training.config_sources import presets

    if source not in presets() and not Path(source).is_file():
        raise ConfigError(f"{source} is neither a folder nor a configuration file nor a preset")
    for key in (override.partition("=")[0] for override in overrides):
        if not re.match(r"(data\.val|data\.on_broken|evaluation)\b", key):
            raise ConfigError(
                f"{key} does not apply to a bundle, which keeps the model and the input sizes it "
                "was exported with; set keys of data.val, data.on_broken or evaluation"
            )
    config = validated_config(source, (*overrides, *_overrides_from(given)))
    if config.data.val is None:
        raise ConfigError(
            "there is no validation set; set data.val.images and data.val.annotations"
        )
    return ValidationSet(config.data.val, config.evaluation, config.data.on_broken)


def _overrides_from(given: Mapping[str, Any]) -> list[str]:
    return [f"evaluation.{key}={given[name]}" for name, key in _KEYS.items() if name in given]


def _is_folder(source: str) -> bool:
    from .training.config_sources import presets

    return source not in presets() and Path(source).is_dir()


def _sentence_from(evaluation: "BundleEvaluation") -> str:
    images = f"{evaluation.images} images"
    if evaluation.left_out:
        images += f" ({evaluation.left_out} left out)"
    return (
        f"{images} in {evaluation.seconds:.1f} s: {evaluation.images_per_second:.1f} images/s in "
        f"{evaluation.precision} with {evaluation.backend} on {evaluation.device}, in batches of "
        f"up to {evaluation.max_batch}"
    )


def _print_metrics(metrics: dict[str, float]) -> None:
    from rich.console import Console

    from .training.coco_metrics import IOU_TITLES, IOU_TYPES, class_table, summary_lines

    if not metrics:
        return
    for iou_type in IOU_TYPES:
        click.echo(f"{IOU_TITLES[iou_type]} AP and AR")
        click.echo("\n".join(summary_lines(metrics, iou_type)))
    Console().print(class_table(metrics))


def _write_json(path: Path | None, content: Mapping[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n")
        click.echo(f"the metrics are in {path}")
