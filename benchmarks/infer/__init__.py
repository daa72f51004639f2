"""`maskrcnn bench infer`: throughput, latency and memory of inference engines."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from ...export.commands import BucketType
from ...model.bundle.manifest import BundleError, Precision, read_manifest
from ...model.bundle.spec import ShapeBucket
from ...model.plurals import counted
from ...serving.config import BackendName
from ..common.images import images_option, read_images
from ..common.record import json_option, output_option, publish
from ..common.timing import seconds_option
from .runners import InferBaseline

if TYPE_CHECKING:
    from .measure import InferFailure, InferSettings

# Exit code if some engines failed and others were measured. It differs from 1, which means that all
# failed, and from 2, which means a usage error.
_SOME_FAILED = 3


@click.command(context_settings={"show_default": True})
@click.argument("references", nargs=-1, required=True, metavar="MODELS...")
@click.option(
    "--batch", "batches", multiple=True, type=click.IntRange(min=1), default=(1, 8),
    help="Batch size to measure; repeatable.",
)  # fmt: skip
@click.option(
    "--precision", "precisions", multiple=True, type=click.Choice(get_args(Precision)),
    help="Precision to measure; repeatable. With --output, the GPU time of each stage is measured "
    "too, in the first precision. Default: the default precision of `maskrcnn serve` for the first "
    "bundle in MODELS, or fp32 without a bundle.",
)  # fmt: skip
@click.option(
    "--backend", type=click.Choice(get_args(BackendName)), default="auto",
    help="Backend of bundles; auto selects as `maskrcnn serve` does.",
)  # fmt: skip
@click.option("--shape", "bucket", type=BucketType(), help="Input size, as in 800x1344.")
@click.option(
    "--peer", "peers", multiple=True, type=click.Choice(get_args(InferBaseline)),
    help="Baseline: torchvision's model with a checkpoint's weights, or ONNX Runtime on a bundle.",
)  # fmt: skip
@images_option("noise")
@seconds_option
@click.option(
    "--warmup", type=click.IntRange(min=0), default=3, help="Minimum number of untimed batches."
)
@json_option
@output_option("a page with the time by stage, a plot")
def infer(
    references: tuple[str, ...],
    peers: tuple[InferBaseline, ...],
    precisions: tuple[Precision, ...],
    sources: tuple[Path, ...],
    json_path: Path | None,
    output: Path | None,
    **values: Any,
) -> None:
    """Measure throughput, latency and memory of models in each --precision at each --batch.

    A model is a bundle, a checkpoint or weights of another implementation. --backend selects the
    backend of bundles. Checkpoints and weights run as eager PyTorch models. A model can also be a
    name that `maskrcnn weights list` prints. The published model of this name is exported once into
    the cache folder, and measured as a bundle. --peer torchvision also measures torchvision's
    model, with the weights of each checkpoint and each published model.

    All models get the same input. Its size is --shape or, by default, the first input size of the
    first model. If a model fails in one precision, this is reported, and the other measurements
    continue. The exit code is then 3, or 1 if all fail.
    """
    from .measure import InferSettings

    models = _models_from(
        references, with_weights="torchvision" in peers, precisions=precisions, **values
    )
    if "torchvision" in peers and not any(model.is_file() for model in models):
        raise click.UsageError(
            "--peer torchvision takes its weights from a checkpoint; add a checkpoint to MODELS"
        )
    if "onnxruntime" in peers and not any(model.is_dir() for model in models):
        raise click.UsageError(
            "--peer onnxruntime runs the ONNX files of a bundle; add a bundle to MODELS"
        )
    images = read_images(sources)
    settings = InferSettings(
        precisions=precisions or (_default_precision(models, values["backend"]),),
        peers=peers,
        images=images,
        with_stages=output is not None,
        **values,
    )
    failures = _measure(models, settings, json_path, output)
    if failures:
        click.echo(
            f"{counted(len(failures), 'engine')} failed; the output above has the reasons", err=True
        )
        click.get_current_context().exit(_SOME_FAILED)


def _models_from(
    references: Sequence[str],
    *,
    with_weights: bool,
    backend: BackendName,
    precisions: tuple[Precision, ...],
    bucket: ShapeBucket | None,
    **_: Any,
) -> list[Path]:
    """Return the paths of bundles and weights files to measure.

    Published models are exported to bundles in the cache folder.

    Args:
        references: paths, or names of published models.
        with_weights: whether to also return the weights file of each published model, which is
            needed to measure torchvision's model.
        backend: backend that the exported bundle must support.
        precisions: precisions to export. Empty: fp32.
        bucket: input size to export. None: use the model's default.

    Raises:
        click.BadParameter: A path does not exist.
        ZooError: No published model has this name, or this package does not support the model.
        DownloadError: A download failed, or a file does not have the published checksum.
    """
    from ...model.weights.downloads import weights_path
    from ...model.weights.zoo import is_zoo_name
    from ...serving.commands.options import bundle_for_backend

    models = []
    for reference in references:
        if is_zoo_name(reference):
            buckets = () if bucket is None else (bucket,)
            models.append(bundle_for_backend(reference, backend, precisions, buckets))
            models += [weights_path(reference)] if with_weights else []
        elif Path(reference).exists():
            models.append(Path(reference))
        else:
            raise click.BadParameter(
                f"Path {reference!r} does not exist; give a bundle, a checkpoint or a name of "
                "`maskrcnn weights list`.",
                param_hint="MODELS...",
            )
    return models


def _default_precision(models: Sequence[Path], backend: BackendName) -> Precision:
    """Return the precision in which the first bundle is served, or fp32 without a bundle."""
    from ...serving.backends.loading import served_precision

    for model in models:
        # The measurement of an unreadable bundle reports the error.
        with contextlib.suppress(BundleError):
            if model.is_dir():
                return served_precision(read_manifest(model), backend)
    return "fp32"


def _measure(
    models: Sequence[Path], settings: "InferSettings", json_path: Path | None, output: Path | None
) -> "Sequence[InferFailure]":
    """Measure all models, publish the benchmark record, and return the failures.

    Each measurement is printed to stderr when it is complete.

    Raises:
        click.ClickException: all engines failed.
    """
    from ...serving.host import gpu_names
    from ..common.gpu_time import StageTimes
    from .measure import (
        InferFailure,
        InferResult,
        Measurement,
        measure_models,
        measure_rooflines,
    )
    from .record import describe_measurement, infer_record

    measurements: list[Measurement] = []

    def collect(measurement: Measurement) -> None:
        measurements.append(measurement)
        label = None
        if not isinstance(measurement, StageTimes):
            # An engine runs either bundles (folders) or weights files.
            is_bundle = Path(measurement.model).is_dir()
            if sum(model.is_dir() == is_bundle for model in models) > 1:
                label = f"{measurement.engine}, {measurement.model}"
        click.echo(describe_measurement(measurement, label), err=True)

    rooflines = measure_rooflines(models, settings) if gpu_names() else []
    try:
        measure_models(models, settings, collect)
    finally:  # if an error or Ctrl+C ends the benchmark, keep the results so far
        results = [one for one in measurements if isinstance(one, InferResult)]
        failures = [one for one in measurements if isinstance(one, InferFailure)]
        stages = [one for one in measurements if isinstance(one, StageTimes)]
        if results:
            publish(infer_record(results, failures, rooflines, stages), json_path, output)
    if not results:
        raise click.ClickException(failures[0].reason)
    return failures
