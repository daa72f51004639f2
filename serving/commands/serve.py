"""Command `serve` and its settings: command-line options, environment variables and a YAML file."""

import difflib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin

import click
import yaml
from click.core import ParameterSource
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError, to_json

from ...model.bundle.manifest import MANIFEST_NAME, MODEL_NAME, MODEL_VERSION
from ...model.config.error_messages import validation_message
from ...model.config.strict_yaml import value_from_yaml
from ...model.weights.downloads import CHECKSUMS_VARIABLE, MIRROR_VARIABLE
from ..config import LogFormat, ServeConfig, ServeFields
from .options import bundle_for_backend, silence_grpc

if TYPE_CHECKING:
    from ..pipeline.served_model import ModelSource  # the command line starts faster without it

# Prefix of the environment variables.
_PREFIX = "MASKRCNN_"

_Command = Callable[..., None]

_NAMED: Final = re.compile(r"([^/=]+)=(.+)")


def config_options(command: _Command) -> _Command:
    """Add one option per ServeConfig field to a command, plus `--config FILE`."""
    for name, field in reversed(ServeConfig.model_fields.items()):
        command = _option(name, field)(command)
    return click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        is_eager=True,  # parsed before the options whose defaults it sets
        expose_value=False,
        callback=_read_environment_and_file,
        envvar=_variable("config"),
        show_envvar=True,
        help="YAML file of the settings below, with _ instead of -, as in max_batch: 8. "
        "Environment variables override the file, and options override both.",
    )(command)


def config_from_options(values: dict[str, Any]) -> ServeConfig:
    """Return the server settings. `values` are the current command's options by name.

    Raises:
        click.UsageError: A value is invalid.
    """
    try:
        return ServeConfig(**values)
    except ValidationError as error:
        message = validation_message(error, ServeConfig)
        name = str(next(iter(error.errors()[0]["loc"]), ""))
        if name:
            message = message.replace(name, _spelling(name), 1)
            # The message suggests null, as in a YAML file. On the command line, users leave the
            # option out instead.
            message = message.replace(", or null", ", or leave it out")
        raise click.UsageError(message) from None


def setting_sources() -> dict[str, str]:
    """Return a text on the source of each setting's value in the current command, by setting name.

    The texts are "by option", "from MASKRCNN_..." (a variable), "from the file" and "the default".
    """
    context = click.get_current_context()
    texts = {
        ParameterSource.COMMANDLINE: "by option",
        ParameterSource.DEFAULT_MAP: "from the file",
        ParameterSource.DEFAULT: "the default",
    }
    return {
        name: texts.get(source, f"from {_variable(name)}")
        for name in ServeConfig.model_fields
        if (source := context.get_parameter_source(name)) is not None
    }


def settings_from_file(path: Path) -> dict[str, Any]:
    """Return the settings in a YAML file, by name.

    Raises:
        click.UsageError: The file is not valid YAML, or has an unknown key or an invalid value.
    """
    try:
        values = value_from_yaml(path.read_text())
        values = {} if values is None else values
        text = to_json(values, inf_nan_mode="constants")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise click.UsageError(
            f"{path} is not valid YAML: {' '.join(str(error).split())}"
        ) from None
    except PydanticSerializationError:
        raise click.UsageError(
            f"{path} holds an invalid value: a list or mapping that contains itself, or an object "
            "that is not plain data; the file must map settings to values, as in port: 8500"
        ) from None
    if not isinstance(values, dict):
        raise click.UsageError(f"{path} must be a mapping of settings to values, as in port: 8500")
    try:
        # Validated as JSON, because strict mode for Python values would reject lists for tuples and
        # text for paths.
        fields = ServeFields.model_validate_json(text, strict=True)
    except ValidationError as error:
        message = validation_message(error, ServeFields)
        raise click.UsageError(f"{path}: {message}") from None
    return fields.model_dump(exclude_unset=True)


def _option(name: str, field: FieldInfo) -> Callable[[_Command], _Command]:
    multiple = get_origin(field.annotation) is tuple
    annotation = get_args(field.annotation)[0] if multiple else field.annotation
    return click.option(
        f"--{name.replace('_', '-')}",
        type=_click_type(annotation),
        multiple=multiple,
        default=field.get_default(call_default_factory=True),
        show_default=not multiple,
        envvar=_variable(name),
        show_envvar=True,
        help=(field.description or "") + (" Can be given several times." if multiple else ""),
    )


def _click_type(annotation: Any) -> Any:
    origin = get_origin(annotation)
    if origin is Literal:
        return click.Choice(get_args(annotation))
    return get_args(annotation)[0] if origin is UnionType else annotation


def _read_environment_and_file(
    context: click.Context, parameter: click.Parameter, path: Path | None
) -> None:
    """Check the names of the environment variables, and read the YAML file with settings.

    The settings in the file become the defaults of the command's options. This function is the
    callback of the option `--config`. `path` is the option's value; None if it is not given.

    Raises:
        click.UsageError: An environment variable `MASKRCNN_...` is empty or does not name a
            setting, or the file is invalid.
    """
    _check_environment()
    if path is not None:
        context.default_map = settings_from_file(path)


def _check_environment() -> None:
    settings = [_variable(name) for name in ("config", *ServeConfig.model_fields)]
    known = [*settings, MIRROR_VARIABLE, CHECKSUMS_VARIABLE]
    # For a service named maskrcnn, Kubernetes sets variables such as MASKRCNN_PORT.
    for name, value in os.environ.items():
        if name.startswith(_PREFIX) and value.startswith(("tcp://", "udp://")):
            raise click.UsageError(
                f"the server reads environment variables {_PREFIX}... as settings, but Kubernetes "
                f"has set {name} to {value} for a service; set `enableServiceLinks: false` in the "
                "specification of the pod"
            )
    for name in os.environ:
        if name.startswith(_PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the settings are {', '.join(known)}"
            raise click.UsageError(f"the environment variable {name} is not a setting; {hint}")
    # click treats an empty variable as unset, so a template without its value would, for example,
    # silently start a server without access control.
    if empty := [name for name in settings if os.environ.get(name) == ""]:
        raise click.UsageError(
            f"the environment variable {empty[0]} is empty; set a value, or remove the variable"
        )


def _spelling(name: str) -> str:
    """Return a setting's name for an error message.

    If the value comes from an environment variable, the name is the variable, such as
    `MASKRCNN_MAX_BATCH`. Otherwise it is the option, such as `--max-batch`.
    """
    if click.get_current_context().get_parameter_source(name) is ParameterSource.ENVIRONMENT:
        return _variable(name)
    return f"--{name.replace('_', '-')}"


def _variable(name: str) -> str:
    return f"{_PREFIX}{name.upper()}"


@click.command()
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@config_options
@click.option(
    "--doctor",
    is_flag=True,
    help="Instead of serving, check the machine, the settings and the models, and report the "
    "results. The exit code is 1 if the server would not start.",
)
def serve(models: tuple[str, ...], doctor: bool, **values: Any) -> None:
    """Serve each MODEL over gRPC and, with --http-port, over HTTP with a page for browsers.

    On SIGTERM or Ctrl+C the server finishes the in-flight requests and ends.

    MODEL is a bundle, a checkpoint, or a name from `maskrcnn weights list`, such as
    torchvision:maskrcnn_resnet50_fpn_v2. A checkpoint or named model is exported once into the
    cache folder, in fp32 unless --precision is given. NAME=MODEL gives the model another name. If
    MODEL is a folder with bundles in NAME/VERSION, the newest version of each model is served. All
    models have the same settings, but each model has its own queues and workers. On SIGHUP the
    server reloads each bundle. It switches to the reloaded bundle after the warm-up.
    """
    silence_grpc()
    config = config_from_options(values)
    sources = model_sources(models, config)
    if doctor:
        from .doctor import show
        from .serve_doctor import diagnose

        healthy = show(diagnose(sources, config, setting_sources()))
        click.get_current_context().exit(0 if healthy else 1)
    # The imports take seconds, in which no model is loaded, so that a signal to reload needs no
    # action.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    import asyncio

    from ..monitoring.logs import configure_logs
    from ..server import serve as serve_bundle

    configure_logs(config.log_format, config.log_level)
    asyncio.run(
        serve_bundle(
            sources,
            config,
            lambda address: _print_line(_ready_line(address, sources, config.log_format)),
        )
    )


def model_sources(arguments: Sequence[str], config: ServeConfig) -> list["ModelSource"]:
    """Return the bundles and the names of the models to serve.

    Args:
        arguments: Arguments of the command. Each argument is a model reference (a bundle, a
            checkpoint, or a name from `maskrcnn weights list`), NAME=REFERENCE, or a repository. A
            repository is a folder with bundles in MODEL/VERSION. The newest version of each of its
            models is served.
        config: Settings of the server.

    Raises:
        click.UsageError: A name is invalid or missing.
        ZooError, DownloadError, click.exceptions.Exit: A model cannot be downloaded or exported;
            see `bundle_for_backend`.
    """
    return [source for argument in arguments for source in _sources_of(argument, config)]


def _sources_of(argument: str, config: ServeConfig) -> list["ModelSource"]:
    from ..pipeline.served_model import ModelSource, versions_in

    models = _models_in(Path(argument))
    if models:
        return [ModelSource(model, _checked(model.name, model), None) for model in models]
    named = None if Path(argument).exists() else _NAMED.fullmatch(argument)
    name, reference = named.groups() if named else (None, argument)
    folder = Path(reference)
    if name and versions_in(folder):
        return [ModelSource(folder, _checked(name, reference), None)]
    if versions_in(folder) and not (folder / MANIFEST_NAME).exists():
        raise click.UsageError(
            f"{reference} holds versions of a model, but no model name; give the name in the "
            f"argument NAME=MODEL, as in {folder.resolve().name}={reference}"
        )
    bundle = bundle_for_backend(reference, config.backend, config.precision)
    if not name:
        return [ModelSource(bundle)]
    version = bundle.name if bundle.name in versions_in(bundle.parent) else MODEL_VERSION
    return [ModelSource(bundle, _checked(name, reference), version)]


def _models_in(folder: Path) -> list[Path]:
    """Return the model folders in a model repository, which holds bundles in MODEL/VERSION.

    Empty if `folder` is not such a repository.
    """
    from ..pipeline.served_model import versions_in

    if not folder.is_dir() or (folder / MANIFEST_NAME).exists():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and versions_in(path))


def _checked(name: str, reference: str | Path) -> str:
    """Return `name` if it is a valid model name. Otherwise raise `click.UsageError`.

    `reference` is the model as the user typed it. The error message shows how to give it another
    name on the command line, as in `street=REFERENCE`.
    """
    if not re.fullmatch(MODEL_NAME, name):
        raise click.UsageError(
            f"{name!r} is not a model name; use letters, digits, '.', '_' and '-', and give name "
            f"and model as NAME=MODEL, such as street={reference}"
        )
    return name


def _ready_line(address: str, models: Sequence["ModelSource"], log_format: LogFormat) -> str:
    # The name of a bundle can have bytes that are not UTF-8.
    bundles = ", ".join(click.format_filename(model.bundle) for model in models)
    line = f"Ready at {address}, serving {bundles}"
    if log_format == "text":
        return line
    return json.dumps({"message": line, "address": address, "bundle": bundles})


def _print_line(line: str) -> None:
    """Print a line. Ignore errors, so that a closed stdout does not stop the server."""
    try:
        click.echo(line)
    except OSError:
        # Python would flush the buffered line again at exit, fail, and exit with an error status.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
