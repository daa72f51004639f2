"""Entry point of the `maskrcnn` command line. Subcommands are imported on use."""

import difflib
import gc
import os
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from io import TextIOWrapper
from typing import NamedTuple, NoReturn

import click
from click.exceptions import NoArgsIsHelpError, NoSuchCommand, NoSuchOption

from . import __version__
from .model.config.lazy_group import LazyGroup


class _LazyCommand(NamedTuple):
    # `module:attribute` of the click command, relative to this package.
    target: str
    # One-line description in `maskrcnn --help`.
    summary: str


_COMMANDS = {
    "quickstart": _LazyCommand(
        "benchmarks.quickstart:quickstart",
        "Train, export, serve and measure a small model.",
    ),
    "data": _LazyCommand(
        "training.data.commands:data",
        "Download, generate, convert and inspect data sets.",
    ),
    "config": _LazyCommand(
        "training.config_commands:config", "Show presets and configuration keys."
    ),
    "weights": _LazyCommand(
        "model.weights.commands:weights",
        "List published models, and convert weights of other implementations.",
    ),
    "train": _LazyCommand("training.commands:train", "Train a model from a preset or a YAML file."),
    "eval": _LazyCommand(
        "benchmarks.accuracy:evaluate",
        "Measure the average precision of a checkpoint or a bundle.",
    ),
    "export": _LazyCommand("export.commands:export", "Turn a checkpoint into a bundle to serve."),
    "engine": _LazyCommand(
        "export.engines.commands:engine", "Inspect, profile and refit TensorRT engines."
    ),
    "serve": _LazyCommand("serving.commands.serve:serve", "Serve models over gRPC and HTTP."),
    "predict": _LazyCommand(
        "serving.commands.predict:predict", "Detect objects in images without a server."
    ),
    "client": _LazyCommand(
        "serving.commands.client:client", "Detect objects in images with a server."
    ),
    "health": _LazyCommand(
        "serving.commands.client:health", "Check whether a server can process requests."
    ),
    "doctor": _LazyCommand(
        "serving.commands.doctor:doctor",
        "Show versions and GPUs, and check TensorRT from end to end.",
    ),
    "bench": _LazyCommand("benchmarks:bench", "Measure throughput and latency."),
    "kernels": _LazyCommand("plugins.commands:kernels", "Compile the CUDA kernels ahead of time."),
}

# Errors that the user can fix are printed as one sentence without a traceback. Listed by name,
# because importing their modules would slow down every command.
_USER_ERRORS = frozenset(
    {
        "maskrcnn_trt.benchmarks.common.processes.ProcessError",
        "maskrcnn_trt.benchmarks.infer.measure.MeasurementError",
        "maskrcnn_trt.benchmarks.serve.results.NoAnswerError",
        "maskrcnn_trt.benchmarks.serve.measure.ServerStartError",
        "maskrcnn_trt.export.errors.EngineError",
        "maskrcnn_trt.export.errors.VerificationError",
        "maskrcnn_trt.model.checkpoint.CheckpointError",
        "maskrcnn_trt.model.download.local_files.DownloadError",
        "maskrcnn_trt.model.image_limits.ImageError",
        "maskrcnn_trt.model.bundle.manifest.BundleError",
        "maskrcnn_trt.model.weights.zoo.ZooError",
        "maskrcnn_trt.plugins.runtime.compilation.KernelError",
        "maskrcnn_trt.benchmarks.quickstart.QuickstartError",
        "maskrcnn_trt.serving.errors.ServingError",
        "maskrcnn_trt.training.config.ConfigError",
        "maskrcnn_trt.training.data.coco.dataset.DataError",
        "maskrcnn_trt.training.distributed.RankLostError",
        "maskrcnn_trt.training.reporting.DivergenceError",
        "maskrcnn_trt.training.trainer.GpuMemoryError",
        "maskrcnn_trt.training.evaluation.validation.ExpectationError",
    }
)


class _CommandLine(LazyGroup):
    """Click group that imports subcommands on use. Its help lists them without importing them."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in _COMMANDS.items()])


@click.group(
    cls=_CommandLine,
    targets={name: f"{__package__}.{command.target}" for name, command in _COMMANDS.items()},
)
@click.version_option(__version__)
def cli() -> None:
    """Mask R-CNN from a COCO-format data set to a served model."""


def main() -> NoReturn:
    """Run the command line. Exit code: 0 success, 1 failure, 2 usage error, 130 interrupted."""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        # Escape characters that cannot be printed, as Python does on standard error. File names can
        # have bytes that are not text, and class names characters that the encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    # A full garbage collection traverses all objects. It frees nothing while torch is imported or a
    # model is traced. With Python's default threshold of 10, full collections take a tenth of the
    # import's and of the tracing's time.
    gc.set_threshold(*gc.get_threshold()[:2], 1000)
    try:
        # If `standalone_mode` is False, click returns None after a command, and the exit code after
        # an early exit such as --help. `sys.exit` turns None into exit code 0.
        sys.exit(cli.main(prog_name="maskrcnn", standalone_mode=False))
    except click.Abort:
        sys.exit(130)
    except NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except click.ClickException as error:
        _exit_with(_message_of_usage_error(error), error.exit_code)
    except Exception as error:
        message = _message_of_user_error(error, sys.argv[1:])
        if message is None:
            raise
        _exit_with(message, 1)


def _exit_with(message: str, code: int) -> NoReturn:
    click.echo(f"Error: {message}", err=True)
    sys.exit(code)


def _message_of_usage_error(error: click.ClickException) -> str:
    """Return the message of a usage error, with a hint on the correct usage.

    The hint depends on the error:

    - unknown command or option: list of the known ones.
    - invalid value: no additional hint, because the message contains one.
    - error without a click context: no hint.
    - any other error: usage line of the command.
    """
    message = error.format_message()
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    if ctx is None:
        return message
    if isinstance(error, NoSuchCommand) and isinstance(ctx.command, click.Group):
        return _unknown_name(ctx, "command", error.command_name, ctx.command.list_commands(ctx))
    if isinstance(error, NoSuchOption):
        options = [p for p in ctx.command.get_params(ctx) if isinstance(p, click.Option)]
        names = [name for o in options if not o.hidden for name in (*o.opts, *o.secondary_opts)]
        return _unknown_name(ctx, "option", error.option_name, names)
    if isinstance(error, click.BadParameter) and not isinstance(error, click.MissingParameter):
        return message
    usage = " ".join(ctx.get_usage().split())
    return f"{message.rstrip('.')}; {usage[0].lower()}{usage[1:]}"


def _unknown_name(ctx: click.Context, kind: str, word: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, allowed, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"{ctx.command_path!r} has no {kind} {word!r}{hint}; choose from {', '.join(allowed)}"


def _message_of_user_error(error: Exception, args: Sequence[str]) -> str | None:
    """Return the message to print for an exception that the user can resolve.

    Return None if the exception is a bug of this package.

    Args:
        error: exception that a command raised.
        args: arguments of the command line, from which the message takes the subcommand's name.
    """
    if any(
        f"{kind.__module__}.{kind.__qualname__}" in _USER_ERRORS for kind in type(error).__mro__
    ):
        return str(error)
    from .model.atomic_files import DISK_FULL  # not needed unless there is an error

    if isinstance(error, OSError) and error.errno in DISK_FULL:
        what = error.strerror
        if what == os.strerror(error.errno):  # else it has a remedy already
            place = "" if error.filename else " while writing a file or the output"
            what = f"{what}{place}; free disk space and try again"
        return f"{error.filename}: {what}" if error.filename else what
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if (
        isinstance(error, UnicodeEncodeError)
        and error.encoding == "utf-8"
        and any(error.object in word for word in args)
    ):
        return f"the argument {error.object!r} has bytes that are not UTF-8; correct it"
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        module = error.name.partition(".")[0]
        extra = _extra_with_module(module)
        if extra is not None:
            command = next(word for word in args if word in _COMMANDS)
            return (
                f"{command!r} needs {module}, which is not installed; "
                f'install it with pip install "maskrcnn-trt[{extra}]"'
            )
    return None


def _extra_with_module(module: str) -> str | None:
    """Return the pip extra of this package that installs a module. None: there is no such extra."""
    for requirement in metadata.requires("maskrcnn-trt") or ():
        name, _, marker = requirement.partition(";")
        distribution = re.match(r"[\w.-]+", name)
        extra = re.search(r"extra\s*==\s*['\"](\w+)['\"]", marker)
        if distribution and extra and distribution[0].replace("-", "_") == module:
            return extra[1]
    return None
