"""The command line as its user meets it: words in, sentences and exit codes out."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from maskrcnn_trt import cli

VERBS = ("quickstart", "data", "train", "eval", "export", "serve", "predict", "client", "bench")


def run(*args: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "maskrcnn_trt", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **kwargs)


def modules_after(*args: str) -> set[str]:
    """Top-level modules that a command line has loaded when it ends."""
    script = (
        "import sys\n"
        "from maskrcnn_trt.cli import main\n"
        f"sys.argv = ['maskrcnn', *{args!r}]\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "print('LOADED', *{name.partition('.')[0] for name in sys.modules})\n"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return set(answer.stdout.splitlines()[-1].split()[1:])


def test_help_lists_the_verbs_and_imports_none_of_them():
    answer = run("--help")
    assert answer.returncode == 0
    for verb in VERBS:
        assert f"\n  {verb} " in answer.stdout
    heavy = {"torch", "numpy", "onnxruntime", "grpc", "pydantic", "rich", "PIL"}
    assert not heavy & modules_after("--help")


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_loads_no_training_stack_and_no_runtime(verb: str):
    assert not {"torch", "onnx", "onnxruntime", "pycocotools"} & modules_after(verb, "--help")


def test_without_words_shows_help():
    answer = run()
    assert answer.returncode == 2
    assert answer.stderr.startswith("Usage: maskrcnn")


def test_version():
    answer = run("--version")
    assert (answer.returncode, answer.stdout) == (0, f"maskrcnn, version {cli.__version__}\n")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_a_command(verb: str):
    with click.Context(cli.cli) as context:
        assert isinstance(cli.cli.get_command(context, verb), click.Command)


def test_errors_named_for_users_exist():
    for name in cli._INPUT_ERRORS:
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
        (["bench", "sevre"], 2, "(did you mean serve?); choose from infer, serve"),
        (["serve", "b", "--prot", "1"], 2, "has no option '--prot' (did you mean --port?); choose"),
        (["serve"], 2, "Missing argument 'BUNDLE'; usage: maskrcnn serve [OPTIONS] BUNDLE"),
        (["serve", "b", "--port", "http"], 2, "Invalid value for '--port': 'http' is not a valid"),
        (
            ["serve", "b", "--port"],
            2,
            "Option '--port' requires an argument; usage: maskrcnn serve",
        ),
        (["train"], 2, "Missing argument 'CONFIG'; usage: maskrcnn train [OPTIONS] CONFIG"),
        (["train", "no-such-preset"], 1, "'no-such-preset' is neither a file nor a preset"),
        (["serve", "no-such-bundle"], 1, "no-such-bundle is no bundle"),
        (["export", "no-such.pth", "-o", "b"], 1, "no-such.pth does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_words_get_one_sentence(args: list[str], code: int, sentence: str, tmp_path: Path):
    answer = run(*args, cwd=tmp_path)
    assert answer.returncode == code
    assert answer.stdout == ""
    assert answer.stderr.startswith("Error: ")
    assert answer.stderr.count("\n") == 1
    assert sentence in answer.stderr


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch):
    """Gives the command line one more verb, which does what it is given to do."""

    def add(action: object) -> None:
        monkeypatch.setitem(cli._VERBS, "probe", cli._Verb("probe:probe", "Probe."))
        monkeypatch.setattr(
            cli.cli, "get_command", lambda ctx, name: click.Command("probe", callback=action)
        )
        monkeypatch.setattr(sys, "argv", ["maskrcnn", "probe"])

    return add


def exit_code_of_main() -> object:
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


def raising(error: BaseException):
    def action() -> None:
        raise error

    return action


def test_a_missing_extra_is_named_with_its_remedy(verb, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)  # makes the real import fail as if absent
    verb(lambda: importlib.import_module("torch"))
    assert exit_code_of_main() == 1
    assert capsys.readouterr().err == (
        "Error: 'probe' needs torch, which is not installed; "
        'install it with pip install "maskrcnn-trt[train]"\n'
    )


def test_a_file_that_cannot_be_used_is_named(verb, tmp_path, capsys):
    verb(lambda: (tmp_path / "absent" / "file").write_text(""))
    assert exit_code_of_main() == 1
    assert capsys.readouterr().err == (
        f"Error: {tmp_path / 'absent' / 'file'}: No such file or directory\n"
    )


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ModuleNotFoundError("x", name="x")])
def test_our_own_faults_keep_their_traceback(verb, error: Exception):
    verb(raising(error))
    with pytest.raises(type(error)):
        cli.main()


def test_an_interrupt_is_quiet(verb, capsys):
    verb(raising(KeyboardInterrupt()))
    assert exit_code_of_main() == 130
    assert capsys.readouterr().err.strip() == ""


def test_an_early_exit_keeps_its_code(verb):
    verb(lambda: click.get_current_context().exit(3))
    assert exit_code_of_main() == 3


def test_a_closed_pipe_is_quiet():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        command = [sys.executable, "-m", "maskrcnn_trt", "--help"]
        answer = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, timeout=60)
    assert answer.stderr == b""
