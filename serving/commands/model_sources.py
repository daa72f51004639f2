"""Models of `maskrcnn serve`: bundles and names."""

import re
from pathlib import Path
from typing import Final

import click

from ...model.bundle.manifest import MODEL_NAME
from ..config import ServeConfig
from ..pipeline.served_model import ModelSource
from .model_reference import bundle_for_backend

_NAMED: Final = re.compile(r"([^/=]+)=(.+)")


def model_source(argument: str, config: ServeConfig) -> ModelSource:
    """Return the bundle and the name of a model to serve.

    Args:
        argument: Model reference as of `bundle_for_backend`, or NAME=REFERENCE.
        config: Settings of the server.

    Raises:
        click.UsageError: The name is invalid.
        ZooError, DownloadError, click.exceptions.Exit: See `bundle_for_backend`.
    """
    named = None if Path(argument).exists() else _NAMED.fullmatch(argument)
    name, reference = named.groups() if named else (None, argument)
    if name and not re.fullmatch(MODEL_NAME, name):
        raise click.UsageError(
            f"{name!r} is not a model name; use letters, digits, '.', '_' and '-', as in "
            f"street={reference}"
        )
    return ModelSource(bundle_for_backend(reference, config.backend, config.precision), name)
