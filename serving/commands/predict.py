"""Command `predict`: detection without a server."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from click.core import ParameterSource

from ...model.bundle.manifest import Precision
from ...model.config.option_types import OUTPUT_FOLDER
from ...model.plurals import counted
from ..config import BackendName, ReportFormat, ServeConfig
from .options import REPORT_OPTIONS, SOURCE, files_and_folder, is_address, options_of

if TYPE_CHECKING:
    from ..detections import DetectionOptions


def _source(value: str) -> Path | str:
    """Convert a click argument to a path, which must exist. Leave an address (`s3://...`) as is."""
    return value if is_address(value) else Path(SOURCE(value))


@click.command()
@click.argument("model")
@click.argument("images", nargs=-1, required=True, type=_source)
@options_of(*REPORT_OPTIONS)
@click.option(
    "--precision",
    type=click.Choice(get_args(Precision)),
    help="Precision of inference. Default: the first one that the bundle has for the backend.",
)
@click.option(
    "--backend",
    type=click.Choice(get_args(BackendName)),
    default="auto",
    show_default=True,
    help=ServeConfig.model_fields["backend"].description,
)
@click.option(
    "--max-batch",
    type=click.IntRange(min=1),
    default=ServeConfig().max_batch,
    show_default=True,
    help="Maximum batch size on a GPU.",
)
@click.option(
    "--ray",
    "with_ray",
    is_flag=True,
    help="Distribute the work with Ray over this machine or the cluster of RAY_ADDRESS. IMAGES and "
    "--output may be addresses, such as s3://bucket/folder. Folders are searched recursively. "
    "Results are Parquet files.",
)
def predict(
    model: str,
    images: Sequence[Path | str],
    output: str,
    formats: Sequence[ReportFormat],
    score_threshold: float,
    precision: Precision | None,
    backend: BackendName,
    max_batch: int,
    with_ray: bool,
) -> None:
    """Detect objects in IMAGES with MODEL, without a server.

    MODEL is a bundle, a checkpoint, or a name from `maskrcnn weights list`, such as
    torchvision:maskrcnn_resnet50_fpn_v2. A checkpoint or named model is exported once into the
    cache folder, in fp32 unless --precision is given. IMAGES are image files, and folders of image
    files. Images in subfolders are ignored.
    """
    from ..detections import DetectionOptions
    from .options import bundle_for_backend

    options = DetectionOptions(score_threshold=score_threshold)
    precisions = () if precision is None else (precision,)
    if with_ray:
        _check_ray_options(output)
        bundle = bundle_for_backend(model, backend, precisions)
        _predict_with_ray(
            bundle, images, output, options,
            precision=precision, backend=backend, max_batch=max_batch,
        )  # fmt: skip
        return
    from ..offline import Detector
    from .reports import write_report

    files, folder = files_and_folder(images, output, formats)
    bundle = bundle_for_backend(model, backend, precisions)
    with (
        Detector(bundle, precision, backend, max_batch) as predictor,
        contextlib.closing(predictor.detect_many(files, options)) as outcomes,
    ):
        write_report(files, outcomes, folder, formats)


def _check_ray_options(output: str) -> None:
    # --format always has a value, at least its default. Only one that the user gave is an error.
    source = click.get_current_context().get_parameter_source("formats")
    if source is ParameterSource.COMMANDLINE:
        raise click.UsageError("--format cannot be combined with --ray, which writes Parquet files")
    if not is_address(output):
        OUTPUT_FOLDER.convert(output, None, click.get_current_context())


def _predict_with_ray(
    bundle: Path,
    images: Sequence[Path | str],
    output: str,
    options: "DetectionOptions",
    **predictor: Any,
) -> None:
    """Detect objects with Ray, write Parquet files, and print how many images succeeded.

    `predictor` holds further keyword arguments of `predict_with_ray`.

    Raises:
        click.ClickException: Some images failed. The results of the other images are written.
    """
    from ..ray_prediction import predict_with_ray

    target = output if is_address(output) else str(Path(output).absolute())
    sources = [i if isinstance(i, str) else str(i.absolute()) for i in images]
    summary = predict_with_ray(bundle, sources, target, options, **predictor)
    images = counted(summary.images - summary.failures, "image")
    click.echo(f"wrote the detections of {images} to {click.format_filename(output)}")
    if summary.failures:
        raise click.ClickException(
            f"{summary.failures} of {counted(summary.images, 'image')} failed; see "
            "the column `error` of the Parquet files"
        )
