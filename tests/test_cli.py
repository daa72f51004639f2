"""Subcommands, exit codes and error handling of the command line."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import pytest
from command_line import run_main

from maskrcnn_trt import cli
from maskrcnn_trt.benchmarks.common.processes import ProcessError
from maskrcnn_trt.benchmarks.infer.measure import MeasurementError

COMMANDS = (
    "quickstart", "data", "config", "weights", "train", "eval", "export", "engine", "serve",
    "predict", "client", "health", "doctor", "bench", "kernels",
)  # fmt: skip


def modules_after(*command_lines: list[str]) -> set[str]:
    """Return the top-level modules that a new interpreter loads for these command lines."""
    script = (
        "import sys\n"
        "from maskrcnn_trt.cli import main\n"
        f"for args in {command_lines!r}:\n"
        "    sys.argv = ['maskrcnn', *args]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, args\n"
        "print('LOADED', *{name.partition('.')[0] for name in sys.modules})\n"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.splitlines()[-1].split()[1:])


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Function that runs a command line in this process: see `run_main`."""
    return partial(run_main, monkeypatch, capsys)


def test_help_lists_all_commands_and_imports_none(call):
    code, output, _ = call("--help")
    assert not code
    for name in COMMANDS:
        assert f"\n  {name} " in output
    heavy = {"torch", "numpy", "onnxruntime", "grpc", "pydantic", "rich", "PIL"}
    assert not heavy & modules_after(["--help"])


def test_help_of_commands_imports_neither_torch_nor_runtimes():
    loaded = modules_after(*([name, "--help"] for name in COMMANDS))
    assert not {"torch", "torchvision", "onnx", "onnxruntime", "pycocotools"} & loaded


def test_no_arguments_shows_help(call):
    code, _, error = call()
    assert code == 2
    assert error.startswith("Usage: maskrcnn")


def test_version(call):
    assert call("--version") == (0, f"maskrcnn, version {cli.__version__}\n", "")


def test_listed_user_errors_exist():
    for name in cli._USER_ERRORS:
        module, _, attribute = name.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), attribute), Exception)


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch):
    """Function that replaces all commands by one, `probe`, with the given callback."""

    def add(action: Callable[[], object]) -> None:
        monkeypatch.setitem(cli._COMMANDS, "probe", cli._LazyCommand("none:none", "Probe."))
        command = click.Command("probe", callback=action)
        monkeypatch.setattr(cli.cli, "get_command", lambda ctx, name: command)

    return add


def raising(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


def test_missing_extra_is_named(call, probe, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # makes the import fail
    probe(lambda: importlib.import_module("torch"))
    code, output, error = call("probe")
    assert (code, output) == (1, "")
    assert 'pip install "maskrcnn-trt[train]"' in error


def test_inaccessible_file_is_named(call, probe, tmp_path: Path):
    path = tmp_path / "absent" / "file"
    probe(lambda: path.write_text(""))
    assert call("probe") == (1, "", f"Error: {path}: No such file or directory\n")


@pytest.mark.parametrize("kind", [ProcessError, MeasurementError])
def test_failed_benchmarks_have_no_traceback(call, probe, kind: type[Exception]):
    probe(raising(kind("memory ran out")))
    assert call("probe") == (1, "", "Error: memory ran out\n")


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ModuleNotFoundError("x", name="x")])
def test_bugs_keep_their_traceback(call, probe, error: Exception):
    probe(raising(error))
    with pytest.raises(type(error)):
        call("probe")


def test_names_that_are_not_text_are_printed(call, probe):
    probe(lambda: click.echo(os.fsdecode(b"bundle\xff")))
    assert call("probe") == (None, "bundle\\udcff\n", "")


def test_argument_that_is_not_utf_8_is_named(call):
    error = r"Error: the argument 'host\udcff:8500' has bytes that are not UTF-8; correct it"
    assert call("health", os.fsdecode(b"host\xff:8500")) == (1, "", f"{error}\n")


def test_interrupt_prints_nothing(call, probe):
    probe(raising(KeyboardInterrupt()))
    code, output, error = call("probe")
    assert (code, output, error.strip()) == (130, "", "")


def test_early_exit_keeps_its_code(call, probe):
    probe(lambda: click.get_current_context().exit(3))
    assert call("probe") == (3, "", "")


def test_error_of_a_real_process():
    command = [sys.executable, "-m", "maskrcnn_trt", "trian"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


def test_closed_pipe_prints_nothing():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        command = [sys.executable, "-m", "maskrcnn_trt", "--help"]
        result = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, timeout=60)
    assert result.stderr == b""
