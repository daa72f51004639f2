"""The command `maskrcnn`: one verb a stage, each imported only when it is used."""

import difflib
import errno
import importlib
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NamedTuple, NoReturn

import click
from click.exceptions import NoArgsIsHelpError, NoSuchCommand, NoSuchOption

from . import __version__


class _Verb(NamedTuple):
    target: str
    """`module:attribute` of the click command, relative to this package."""
    summary: str


_VERBS = {
    "quickstart": _Verb("quickstart:quickstart", "Go the whole path once, in minutes, on a CPU."),
    "data": _Verb(
        "training.data.commands:data",
        "Download, draw, convert and inspect data sets in COCO format.",
    ),
    "config": _Verb("training.config_commands:config", "Show presets and configuration keys."),
    "weights": _Verb("model.weights.commands:weights", "Take over weights of other programs."),
    "train": _Verb("training.commands:train", "Train a model from a preset or a YAML file."),
    "eval": _Verb(
        "evaluation_commands:evaluate", "Measure the average precision of a checkpoint or a bundle."
    ),
    "export": _Verb("export.commands:export", "Turn a checkpoint into a bundle to serve."),
    "engine": _Verb("export.engine_commands:engine", "Look into TensorRT engines."),
    "serve": _Verb("serving.serve_command:serve", "Serve a bundle over gRPC."),
    "predict": _Verb("serving.predict_command:predict", "Detect in images without a server."),
    "client": _Verb("serving.client_command:client", "Detect in images by asking a server."),
    "bench": _Verb("benchmarks.commands:bench", "Measure throughput and latency."),
    "kernels": _Verb("plugins.commands:kernels", "Compile the CUDA kernels beforehand."),
}

# What the user can act on gets a sentence, not a traceback. Named rather than imported, so that no
# verb pays for the modules of another.
_USER_ERRORS = frozenset(
    {
        "maskrcnn_trt.benchmarks.serve_results.NoAnswerError",
        "maskrcnn_trt.benchmarks.server_process.ServerStartError",
        "maskrcnn_trt.export.errors.EngineError",
        "maskrcnn_trt.export.verify.VerificationError",
        "maskrcnn_trt.model.checkpoint.CheckpointError",
        "maskrcnn_trt.model.images.ImageError",
        "maskrcnn_trt.model.manifest.BundleError",
        "maskrcnn_trt.plugins.compilation.KernelError",
        "maskrcnn_trt.quickstart.QuickstartError",
        "maskrcnn_trt.serving.errors.ServingError",
        "maskrcnn_trt.training.config.ConfigError",
        "maskrcnn_trt.training.data.coco.DataError",
        "maskrcnn_trt.training.reporting.DivergenceError",
        "maskrcnn_trt.training.validation.ExpectationError",
    }
)

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class _LazyGroup(click.Group):
    """A group that knows its commands by name and summary and imports the one that is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        module, _, attribute = _VERBS[cmd_name].target.partition(":")
        command = getattr(importlib.import_module(f".{module}", __package__), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.summary) for name, verb in _VERBS.items()])


@click.group(cls=_LazyGroup)
@click.version_option(__version__)
def cli() -> None:
    """Mask R-CNN from a COCO-format data set to a served model."""


def main() -> NoReturn:
    """Run the command line and exit: 0 done, 1 failed, 2 misused, 130 interrupted."""
    try:
        # Commands return nothing; what comes back is the code of an early exit such as --help.
        sys.exit(cli.main(prog_name="maskrcnn", standalone_mode=False))
    except click.Abort:
        sys.exit(130)
    except NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        _exit_with(_sentence_from_click(error), error.exit_code)
    except Exception as error:
        sentence = _sentence_from_fault(error, sys.argv[1:])
        if sentence is None:
            raise
        _exit_with(sentence, 1)


def _exit_with(sentence: str, code: int) -> NoReturn:
    click.echo(f"Error: {sentence}", err=True)
    sys.exit(code)


def _sentence_from_click(error: click.ClickException) -> str:
    """What was wrong on the command line, and what is allowed there."""
    message = error.format_message()
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    if ctx is None:
        return message
    if isinstance(error, NoSuchCommand) and isinstance(ctx.command, click.Group):
        return _refusal(ctx, "command", error.command_name, ctx.command.list_commands(ctx))
    if isinstance(error, NoSuchOption):
        options = [p for p in ctx.command.get_params(ctx) if isinstance(p, click.Option)]
        names = [name for o in options if not o.hidden for name in (*o.opts, *o.secondary_opts)]
        return _refusal(ctx, "option", error.option_name, names)
    if isinstance(error, click.BadParameter) and not isinstance(error, click.MissingParameter):
        return message
    usage = " ".join(ctx.get_usage().split())
    return f"{message.rstrip('.')}; {usage[0].lower()}{usage[1:]}"


def _refusal(ctx: click.Context, kind: str, word: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, allowed, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"{ctx.command_path!r} has no {kind} {word!r}{hint}; choose from {', '.join(allowed)}"


def _sentence_from_fault(error: Exception, args: Sequence[str]) -> str | None:
    """What the user can act on, or None where the fault is ours."""
    if any(
        f"{kind.__module__}.{kind.__qualname__}" in _USER_ERRORS for kind in type(error).__mro__
    ):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in _NO_ROOM:  # in writing, which names no file
        return f"{error.strerror}, in writing a file or the output; make room and try again"
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        module = error.name.partition(".")[0]
        extra = _extra_with(module)
        if extra is not None:
            verb = next(word for word in args if word in _VERBS)
            return (
                f"{verb!r} needs {module}, which is not installed; "
                f'install it with pip install "maskrcnn-trt[{extra}]"'
            )
    return None


def _extra_with(module: str) -> str | None:
    """The extra of this distribution that installs a module."""
    for requirement in metadata.requires("maskrcnn-trt") or ():
        name, _, marker = requirement.partition(";")
        distribution = re.match(r"[\w.-]+", name)
        extra = re.search(r"extra\s*==\s*['\"](\w+)['\"]", marker)
        if distribution and extra and distribution[0].replace("-", "_") == module:
            return extra[1]
    return None
