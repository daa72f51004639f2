"""Conversion of the arguments of `maskrcnn serve` to bundles and model names."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from ...model.bundle.manifest import MANIFEST_NAME, MODEL_NAME, MODEL_VERSION
from ..config import ServeConfig
from ..pipeline.served_model import ModelSource, versions_in
from .options import bundle_for_backend

_NAMED: Final = re.compile(r"([^/=]+)=(.+)")


def model_sources(arguments: Sequence[str], config: ServeConfig) -> list[ModelSource]:
    """Return the bundles and the names of the models to serve.

    Args:
        arguments: Arguments of the command. Each argument is a model reference (a bundle, a
            checkpoint, or a name from `maskrcnn weights list`), NAME=REFERENCE, or a repository. A
            repository is a folder with bundles in MODEL/VERSION. The newest version of each of its
            models is served.
        config: Settings of the server.

    Raises:
        click.UsageError: A name is invalid.
        ZooError, DownloadError, click.exceptions.Exit: A model cannot be downloaded or exported;
            see `bundle_for_backend`.
    """
    return [source for argument in arguments for source in _sources_of(argument, config)]


def _sources_of(argument: str, config: ServeConfig) -> list[ModelSource]:
    models = _models_in(Path(argument))
    if models:
        return [ModelSource(model, _checked(model.name, model), None) for model in models]
    named = None if Path(argument).exists() else _NAMED.fullmatch(argument)
    name, reference = named.groups() if named else (None, argument)
    if name and versions_in(Path(reference)):
        return [ModelSource(Path(reference), _checked(name, reference), None)]
    bundle = bundle_for_backend(reference, config.backend, config.precision)
    if not name:
        return [ModelSource(bundle)]
    version = bundle.name if bundle.name in versions_in(bundle.parent) else MODEL_VERSION
    return [ModelSource(bundle, _checked(name, reference), version)]


def _models_in(folder: Path) -> list[Path]:
    """Return the model folders in a model repository; empty if `folder` is not a repository."""
    if not folder.is_dir() or (folder / MANIFEST_NAME).exists():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and versions_in(path))


def _checked(name: str, reference: str | Path) -> str:
    """Return `name` if it is a valid model name. Otherwise raise `click.UsageError`.

    The error message shows the model reference `reference` in an example.
    """
    if not re.fullmatch(MODEL_NAME, name):
        raise click.UsageError(
            f"{name!r} is not a model name; use letters, digits, '.', '_' and '-', as in "
            f"street={reference}"
        )
    return name
