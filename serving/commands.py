"""The verbs `serve`, `client` and `predict`."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import click
from pydantic import ValidationError

from ..model.manifest import Precision
from .config import BackendName, ServeConfig

_Command = Callable[..., None]

_BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))
_IMAGES = click.argument(
    "images", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path)
)
_OUTPUT = click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default="detections",
    show_default=True,
    help="Folder for the pictures and detections.json.",
)
_THRESHOLD = click.option(
    "--score-threshold",
    type=click.FloatRange(0, 1),
    default=0.5,
    show_default=True,
    help="Leave out detections that score no higher.",
)
_CHOICES = {"precision": get_args(Precision), "backend": get_args(BackendName)}
_PRECISION = click.option(
    "--precision",
    type=click.Choice(_CHOICES["precision"]),
    help="The default is the backend's first in the bundle.",
)
_BACKEND = click.option(
    "--backend",
    type=click.Choice(_CHOICES["backend"]),
    default="auto",
    show_default=True,
    help=ServeConfig.model_fields["backend"].description,
)


def _config_options(command: _Command) -> _Command:
    """One option a field of ServeConfig."""
    for name, field in reversed(ServeConfig.model_fields.items()):
        kind = click.Choice(_CHOICES[name]) if name in _CHOICES else field.annotation
        command = click.option(
            f"--{name.replace('_', '-')}",
            type=kind,
            default=field.get_default(call_default_factory=True),
            show_default=True,
            help=field.description,
        )(command)
    return command


@click.command()
@_BUNDLE
@_config_options
def serve(bundle: Path, **values: Any) -> None:
    """Serve BUNDLE over gRPC until SIGTERM or Ctrl+C, then finish the requests in progress."""
    import asyncio
    import logging

    from .server import serve as serve_bundle

    try:
        config = ServeConfig(**values)
    except ValidationError as error:
        fault = error.errors()[0]
        option = str(fault["loc"][0]).replace("_", "-")
        raise click.UsageError(f"--{option} is {fault['input']}; {fault['msg'].lower()}") from None
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger(__package__).setLevel(logging.INFO)
    asyncio.run(
        serve_bundle(
            bundle, config, lambda address: click.echo(f"Ready at {address}, serving {bundle}")
        )
    )


@click.command()
@click.argument("host")
@_IMAGES
@_OUTPUT
@_THRESHOLD
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Requests in flight.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds to wait for an answer.",
)
def client(
    host: str,
    images: Sequence[Path],
    output: Path,
    score_threshold: float,
    concurrency: int,
    timeout: float,
) -> None:
    """Ask the server at HOST, such as localhost:8500, for the objects in IMAGES.

    IMAGES are files and folders. What is found is drawn into PNGs and listed in detections.json.
    """
    from .client import DetectorClient
    from .detections import DetectionOptions
    from .reports import image_files, write_report

    files = image_files(images)
    options = DetectionOptions(score_threshold=score_threshold)
    with DetectorClient(host, timeout_s=timeout) as detector:
        write_report(files, detector.detect_many(files, options, concurrency=concurrency), output)


@click.command()
@_BUNDLE
@_IMAGES
@_OUTPUT
@_THRESHOLD
@_PRECISION
@_BACKEND
@click.option(
    "--max-batch",
    type=click.IntRange(min=1),
    default=ServeConfig().max_batch,
    show_default=True,
    help="Images that a GPU computes at once.",
)
def predict(
    bundle: Path,
    images: Sequence[Path],
    output: Path,
    score_threshold: float,
    precision: Precision | None,
    backend: BackendName,
    max_batch: int,
) -> None:
    """Detect objects in IMAGES with BUNDLE, without a server.

    IMAGES are files and folders. What is found is drawn into PNGs and listed in detections.json.
    """
    from .detections import DetectionOptions
    from .predictor import Predictor
    from .reports import image_files, write_report

    files = image_files(images)
    options = DetectionOptions(score_threshold=score_threshold)
    with contextlib.closing(Predictor(bundle, precision, backend, max_batch)) as predictor:
        contents = (path.read_bytes() for path in files)
        write_report(files, predictor.detect_many(contents, options), output)
