"""Settings of the server: by the same names on the command line, in the environment, in a file."""

import difflib
import os
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

import click
from click.core import ParameterSource
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ..model.config_faults import sentence_from_fault
from .config import ServeConfig
from .settings_file import settings_from_file

_PREFIX = "MASKRCNN_"
"""Of the names of variables in the environment."""

_Command = Callable[..., None]


def config_options(command: _Command) -> _Command:
    """Give a command an option a field of ServeConfig, and one for a file of them."""
    for name, field in reversed(ServeConfig.model_fields.items()):
        command = _option(name, field)(command)
    return click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        is_eager=True,  # before the options whose defaults it gives
        expose_value=False,
        callback=_take_defaults,
        envvar=_variable("config"),
        show_envvar=True,
        help="YAML file of the settings below, with _ for -; the environment goes before it, and "
        "options before that.",
    )(command)


def config_from_options(values: dict[str, Any]) -> ServeConfig:
    """The configuration that the options of the command in progress make up.

    Raises:
        click.UsageError: a value is not allowed, or the environment holds an unknown setting.
    """
    _check_environment()
    try:
        return ServeConfig(**values)
    except ValidationError as error:
        sentence = sentence_from_fault(error, ServeConfig)
        name = str(next(iter(error.errors()[0]["loc"]), ""))
        if name:
            sentence = sentence.replace(name, _spelling(name), 1)
        raise click.UsageError(sentence) from None


def setting_sources() -> dict[str, str]:
    """Where each setting of the command in progress comes from, in words."""
    context = click.get_current_context()
    words = {
        ParameterSource.COMMANDLINE: "by option",
        ParameterSource.DEFAULT_MAP: "from the file",
        ParameterSource.DEFAULT: "the default",
    }
    return {
        name: words.get(source, f"from {_variable(name)}")
        for name in ServeConfig.model_fields
        if (source := context.get_parameter_source(name)) is not None
    }


def _option(name: str, field: FieldInfo) -> Callable[[_Command], _Command]:
    several = get_origin(field.annotation) is tuple
    kind = get_args(field.annotation)[0] if several else field.annotation
    return click.option(
        f"--{name.replace('_', '-')}",
        type=_click_type(kind),
        multiple=several,
        default=field.get_default(call_default_factory=True),
        show_default=not several,
        envvar=_variable(name),
        show_envvar=True,
        help=(field.description or "") + (" Can be given several times." if several else ""),
    )


def _click_type(kind: Any) -> Any:
    origin = get_origin(kind)
    if origin is Literal:
        return click.Choice(get_args(kind))
    return get_args(kind)[0] if origin is UnionType else kind


def _take_defaults(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    """Make what a file says the defaults of the command."""
    if path is not None:
        context.default_map = settings_from_file(path)


def _check_environment() -> None:
    known = [_variable(name) for name in ("config", *ServeConfig.model_fields)]
    for name in os.environ:
        if name.startswith(_PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            raise click.UsageError(f"the environment variable {name} is no setting; {hint}")


def _spelling(name: str) -> str:
    """The name of a setting where its value was set."""
    if click.get_current_context().get_parameter_source(name) is ParameterSource.ENVIRONMENT:
        return _variable(name)
    return f"--{name.replace('_', '-')}"


def _variable(name: str) -> str:
    return f"{_PREFIX}{name.upper()}"
