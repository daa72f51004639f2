"""The command line as its user meets it: words in, sentences and exit codes out."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from maskrcnn_trt import cli

VERBS = (
    "quickstart", "data", "config", "weights", "train", "eval", "export", "engine", "serve",
    "predict", "client", "bench", "kernels",
)  # fmt: skip


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "maskrcnn_trt", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def modules_after(*command_lines: list[str]) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after these command lines."""
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
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    return set(answer.stdout.splitlines()[-1].split()[1:])


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs a command line in this process: its exit code, what it printed, its error stream."""

    def call(*args: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["maskrcnn", *args])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code, *capsys.readouterr()

    return call


def test_help_lists_the_verbs_and_imports_none_of_them():
    answer = run("--help")
    assert answer.returncode == 0
    for verb in VERBS:
        assert f"\n  {verb} " in answer.stdout
    heavy = {"torch", "numpy", "onnxruntime", "grpc", "pydantic", "rich", "PIL"}
    assert not heavy & modules_after(["--help"])


def test_help_of_the_verbs_loads_no_training_stack_and_no_runtime():
    loaded = modules_after(*([verb, "--help"] for verb in VERBS))
    assert not {"torch", "torchvision", "onnx", "onnxruntime", "pycocotools"} & loaded


def test_without_words_shows_help(call):
    code, _, error = call()
    assert code == 2
    assert error.startswith("Usage: maskrcnn")


def test_version(call):
    assert call("--version") == (0, f"maskrcnn, version {cli.__version__}\n", "")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_a_command(verb: str):
    with click.Context(cli.cli) as context:
        assert isinstance(cli.cli.get_command(context, verb), click.Command)


def test_errors_named_for_users_exist():
    for name in cli._USER_ERRORS:
        module, _, attribute = name.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), attribute), Exception)


@pytest.mark.parametrize(
    ("args", "code", "sentence"),
    [
        (
            ["trian"],
            2,
            "'maskrcnn' has no command 'trian' (did you mean train?); "
            f"choose from {', '.join(VERBS)}",
        ),
        (["xyz"], 2, f"'maskrcnn' has no command 'xyz'; choose from {', '.join(VERBS)}"),
        (["bench", "sevre"], 2, "(did you mean serve?); choose from bulk, infer, kernels, serve"),
        (["serve", "b", "--prot", "1"], 2, "has no option '--prot' (did you mean --port?); choose"),
        (["serve"], 2, "Missing argument 'BUNDLE'; usage: maskrcnn serve [OPTIONS] BUNDLE"),
        (
            ["serve", "b", "--port", "http"],
            2,
            "Invalid value for '--port' (env var: 'MASKRCNN_PORT'): 'http' is not a valid",
        ),
        (["serve", "b", "--port"], 2, "Option '--port' requires an argument"),
        (["train"], 2, "Missing argument 'CONFIG'; usage: maskrcnn train [OPTIONS] CONFIG"),
        (["train", "no-such-preset"], 1, "'no-such-preset' is neither a file nor a preset"),
        (["serve", "no-such-bundle"], 1, "no-such-bundle is no bundle"),
        (["export", "no-such.pth", "-o", "b"], 1, "no-such.pth does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_words_get_one_sentence(call, args: list[str], code: int, sentence: str):
    found, output, error = call(*args)
    assert (found, output) == (code, "")
    assert error.startswith("Error: ")
    assert error.count("\n") == 1
    assert sentence in error


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch):
    """Gives the command line a verb, `probe`, which does what the test says."""

    def add(action: Callable[[], object]) -> None:
        monkeypatch.setitem(cli._VERBS, "probe", cli._Verb("none:none", "Probe."))
        command = click.Command("probe", callback=action)
        monkeypatch.setattr(cli.cli, "get_command", lambda ctx, name: command)

    return add


def raising(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


def test_a_missing_extra_is_named_with_its_remedy(call, probe, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # makes the real import fail as if absent
    probe(lambda: importlib.import_module("torch"))
    assert call("probe") == (
        1,
        "",
        "Error: 'probe' needs torch, which is not installed; "
        'install it with pip install "maskrcnn-trt[train]"\n',
    )


def test_a_file_that_cannot_be_used_is_named(call, probe, tmp_path: Path):
    path = tmp_path / "absent" / "file"
    probe(lambda: path.write_text(""))
    assert call("probe") == (1, "", f"Error: {path}: No such file or directory\n")


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ModuleNotFoundError("x", name="x")])
def test_our_own_faults_keep_their_traceback(call, probe, error: Exception):
    probe(raising(error))
    with pytest.raises(type(error)):
        call("probe")


def test_an_interrupt_is_quiet(call, probe):
    probe(raising(KeyboardInterrupt()))
    code, output, error = call("probe")
    assert (code, output, error.strip()) == (130, "", "")


def test_an_early_exit_keeps_its_code(call, probe):
    probe(lambda: click.get_current_context().exit(3))
    assert call("probe") == (3, "", "")


def test_a_sentence_reaches_the_terminal_of_a_real_process():
    answer = run("trian")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith(
        "Error: 'maskrcnn' has no command 'trian' (did you mean train?)"
    )


def test_a_closed_pipe_is_quiet():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        command = [sys.executable, "-m", "maskrcnn_trt", "--help"]
        answer = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, timeout=60)
    assert answer.stderr == b""
