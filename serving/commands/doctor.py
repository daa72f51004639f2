"""Command `doctor`: check this machine. With `--tensorrt`, also build and test TensorRT engines.

The page export/engines/README.md describes the steps of `doctor --tensorrt`. The command
`serve --doctor` uses the functions of this module that check the machine and print results.
"""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final, Literal, NamedTuple

import click
from click.core import ParameterSource

from ...model.child_process import module_command
from ..errors import BackendError
from ..host import gpu_names, installed_versions

FOLDER: Final = "runs/first"
REPORT: Final = Path(FOLDER, "report")
_BUNDLE: Final = f"{FOLDER}/bundle"
_EVALUATION: Final = f"maskrcnn eval {_BUNDLE} data/synthetic"
# Folder of tests that `doctor --tensorrt` runs. Only a checkout of the repository has this folder.
_TESTS: Final = Path("tests/plugins")
# Largest accepted difference in box AP (0..1) between TensorRT in fp16 and ONNX Runtime in fp32.
_AP_TOLERANCE: Final = 0.005
# If a step fails, this many lines at the end of its output are shown.
_SHOWN_LINES: Final = 15

_DISTRIBUTIONS: Final = (
    "maskrcnn-trt",
    "grpcio",
    "protobuf",
    "numpy",
    "pillow",
    "onnxruntime",
    "onnxruntime-gpu",
    "torch",
    "tensorrt",
    "tensorrt-rtx",
    "pycuda",
)

State = Literal["ok", "note", "warning", "fault"]

_STYLES: Final[Mapping[State, str]] = {
    "ok": "green",
    "note": "dim",
    "warning": "yellow",
    "fault": "bold red",
}


class FirstRunStep(NamedTuple):
    """One step that `doctor --tensorrt` runs: its commands, and the output that shows success."""

    commands: tuple[str, ...]
    # Description of the output that shows success.
    must_print: str
    # Regular expressions that the output must match.
    patterns: tuple[str, ...] = ()
    # Regular expression that the output must not match. "": there is no such expression.
    fault: str = ""
    # File that is copied into the report folder after the step, if it exists. "": copy no file.
    file: str = ""


STEPS: Final = (
    FirstRunStep(
        ('pip install ".[train,cpu,tensorrt,dev]"',),
        "`tensorrt`, `cuda-bindings`, and `nvidia-cuda-nvrtc` 13.0",
        (r"(?m)^tensorrt ", r"(?m)^cuda-bindings ", r"(?m)^nvidia-cuda-nvrtc 13\.0"),
    ),
    FirstRunStep(("maskrcnn kernels build",), "no error"),
    FirstRunStep(
        ("maskrcnn data synthetic data/synthetic --train 200 --val 20 --size 192x128",), "no error"
    ),
    FirstRunStep(
        (f"maskrcnn train quick output_dir={FOLDER}",),
        f"`the final checkpoint is {FOLDER}/model_final.pth`",
        (rf"the final checkpoint is {FOLDER}/model_final\.pth",),
        file=f"{FOLDER}/log.txt",
    ),
    FirstRunStep(
        (
            f"maskrcnn export {FOLDER}/model_final.pth -o {_BUNDLE} --precision fp32 fp16 "
            "--engine tensorrt",
        ),
        f"`the bundle is {_BUNDLE}`, and no warning that an engine `should compute in` another "
        "precision",
        (rf"the bundle is {_BUNDLE}",),
        "should compute in",
        f"{_BUNDLE}.build.log",
    ),
    FirstRunStep(
        (f"maskrcnn engine inspect {_BUNDLE}/model-fp16-128x192.plan",),
        "plugins `maskrcnn::DecodeBoxes 1`, `maskrcnn::NmsKeep 1`, `maskrcnn::PyramidRoIAlign 1`; "
        "convolutions that read `fp16`",
        (
            "maskrcnn::DecodeBoxes 1",
            "maskrcnn::NmsKeep 1",
            "maskrcnn::PyramidRoIAlign 1",
            # Row `fp16` of the table of input types: layers, their share, one or more convolutions.
            r"(?m)^\W*fp16\W+\d+\W+\d+%\W+[1-9]",
        ),
    ),
    FirstRunStep(
        ("pytest -m tensorrt tests/plugins tests/export/engines",),
        "`passed`, none failed",
        (r"\d+ passed",),
    ),
    FirstRunStep(
        (
            f"{_EVALUATION} --backend onnxruntime --precision fp32 --json {FOLDER}/reference.json",
            f"{_EVALUATION} --backend tensorrt --precision fp16 --json {FOLDER}/tensorrt.json",
        ),
        "a box AP that differs by at most 0.5 points between the backends",
    ),
    FirstRunStep(
        (f"maskrcnn serve {_BUNDLE} --backend tensorrt --doctor",),
        "`ok tensorrt would be used`, and `a server started, warmed up and stopped`",
        (r"ok\s+tensorrt\s+would be used", "a server started, warmed up and stopped"),
    ),
    FirstRunStep(
        (
            f"maskrcnn bench infer {_BUNDLE} --backend tensorrt --precision fp16 --batch 1 "
            "--batch 8",
        ),
        "images/s in batches of 1 and 8",
        tuple(rf"tensorrt in fp16 at batch {batch}: [\d.]+ images/s" for batch in (1, 8)),
    ),
)


@click.command()
@click.option(
    "--tensorrt",
    is_flag=True,
    help="Also check TensorRT on this machine, in ten steps. Run this in the repository's folder.",
)
@click.option(
    "--from",
    "first",
    type=click.IntRange(1, len(STEPS)),
    default=1,
    show_default=True,
    help="With --tensorrt: number of the step to begin with. Steps before it are not run.",
)
def doctor(tensorrt: bool, first: int) -> None:
    """Show versions and GPUs of this machine. With --tensorrt, also check TensorRT.

    The check of TensorRT has ten steps, from the list of installed packages to the speed of an
    exported model. If a step fails, the later steps do not run, and the exit code is 1.
    `maskrcnn serve MODEL --doctor` checks a bundle and the settings of a server.
    """
    source = click.get_current_context().get_parameter_source("first")
    if source is ParameterSource.COMMANDLINE and not tensorrt:
        raise click.UsageError("--from has no effect without --tensorrt")
    show([machine_section()])
    if tensorrt:
        _check_requirements()
    if tensorrt and not run_steps(STEPS, REPORT, first):
        click.get_current_context().exit(1)


def _check_requirements() -> None:
    """Check that the steps of `doctor --tensorrt` can run on this machine and in this folder.

    Raises:
        click.ClickException: There is no GPU, or the current folder is not a checkout of the
            repository.
    """
    if not gpu_names():
        raise click.ClickException(
            "--tensorrt needs an NVIDIA GPU, but nvidia-smi reports none; run it on a machine with "
            "a GPU and its driver"
        )
    if not _TESTS.is_dir():
        raise click.ClickException(
            f"--tensorrt runs tests and writes files in a checkout of the repository, but "
            f"{Path.cwd()} has no folder {_TESTS}; change to the folder of a checkout"
        )


def run_steps(steps: Sequence[FirstRunStep], report: Path, first: int = 1) -> bool:
    """Run steps in order until one fails. Return whether all steps passed.

    Args:
        steps: The steps.
        report: Output folder. It gets a file with the output of each step, copies of the files
            that steps name, and `machine.txt` with the GPU and the package versions.
        first: Number of the first step to run, from 1.
    """
    report.mkdir(parents=True, exist_ok=True)
    (report / "machine.txt").write_text(_output_of(["nvidia-smi"]) + _installed())
    for number, step in enumerate(steps[first - 1 :], first):
        for command in step.commands:
            click.echo(f"{number}/{len(steps)} {command}")
        start = time.monotonic()
        output, problem = _run(step)
        path = report / f"{number:02}.txt"
        path.write_text(output)
        # Also if the step passed, because the build log can explain why a later step fails.
        if Path(step.file).is_file():
            shutil.copy(step.file, report)
        if problem:
            click.echo(_failure(number, step, output, problem, report))
            return False
        click.echo(f"     ok, {time.monotonic() - start:.0f} s, output in {path}")
    click.echo(f"all steps passed; send the folder {report} if you want to report the result")
    return True


def _run(step: FirstRunStep) -> tuple[str, str]:
    """Run the commands of a step. Return their output, and why the step failed ("" if it passed).

    Commands that begin with `pip` are not run. Their output is replaced by the list of installed
    packages and versions.
    """
    output = ""
    for command in step.commands:
        program, *words = shlex.split(command)
        # The packages are installed already, so only their versions are recorded.
        if program == "pip":
            output += _installed()
            continue
        module = {"maskrcnn": __package__.partition(".")[0]}.get(program, program)
        result = subprocess.run(
            [*module_command(module), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A wide terminal, because the patterns do not match tables with wrapped lines.
            env=os.environ | {"COLUMNS": "200", "PYTHONIOENCODING": "utf-8"},
        )
        output += f"$ {command}\n{result.stdout}"
        if result.returncode:
            return output, f"the exit code is {result.returncode}"
    if step.fault and (found := re.search(step.fault, output)):
        return output, f"the output contains {found[0]!r}"
    missing = [pattern for pattern in step.patterns if not re.search(pattern, output)]
    if missing:
        return output, f"the output does not match {missing[0]!r}"
    results = [w for c in step.commands for w in shlex.split(c) if w.endswith(".json")]
    return output, _difference(results) if results else ""


def _difference(files: Sequence[str]) -> str:
    """Return a message if the box APs in two result files differ by more than `_AP_TOLERANCE`.

    Otherwise, return "".
    """
    first, second = (json.loads(Path(file).read_text())["metrics"]["bbox/AP"] for file in files)
    agree = abs(first - second) <= _AP_TOLERANCE
    return "" if agree else f"the box AP differs: {first:.4f} and {second:.4f}"


def _failure(number: int, step: FirstRunStep, output: str, problem: str, report: Path) -> str:
    lines = "\n".join(f"     | {line}" for line in output.splitlines()[-_SHOWN_LINES:])
    return (
        f"{lines}\n     failed: {problem}\n     must print: {step.must_print}\n"
        f"     send: the folder {report}, in an issue that names step {number}\n"
        f"     after the remedy, continue with: maskrcnn doctor --tensorrt --from {number}"
    )


def _installed() -> str:
    """Return name and version of each installed distribution, one per line."""
    found = {
        str(d.metadata["Name"]).lower().replace("_", "-"): d.version
        for d in metadata.distributions()
    }
    return "".join(f"{name} {version}\n" for name, version in sorted(found.items()))


def _output_of(command: Sequence[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}\n"


class CheckResult(NamedTuple):
    """Result of one check: the item checked and its outcome."""

    subject: str
    text: str
    # "fault": the server would not start, or clients would reject its certificate.
    state: State = "ok"


class CheckSection(NamedTuple):
    """Results of related checks, under a title."""

    title: str
    results: list[CheckResult]

    @property
    def is_healthy(self) -> bool:
        """True if no check of this section found a fault."""
        return all(result.state != "fault" for result in self.results)


def machine_section() -> CheckSection:
    """Return the package versions and GPUs of this machine, and problems with ONNX Runtime."""
    versions = {"Python": platform.python_version(), **installed_versions(_DISTRIBUTIONS)}
    gpus = gpu_names() or ("nvidia-smi reports none",)
    results = [
        *(CheckResult(name, version) for name, version in versions.items()),
        *(CheckResult("GPU", gpu) for gpu in gpus),
        *_onnxruntime_results(),
    ]
    return CheckSection("Machine", results)


def show(sections: Iterable[CheckSection]) -> bool:
    """Print each section's results in a table. Return True if no check found a fault.

    A section is printed as soon as the iterable `sections` yields it.
    """
    # Imported here because --help does not need it.
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from ...plugins.runtime.console import table_console

    healthy = True
    for section in sections:
        # Names of bundles and files can have bytes that are not UTF-8.
        title = click.format_filename(section.title)
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_header=False)
        for result in section.results:
            state = Text(result.state, _STYLES[result.state])
            texts = (result.subject, result.text)
            table.add_row(state, *(Text(click.format_filename(text)) for text in texts))
        table_console().print(table)
        healthy = healthy and section.is_healthy
    return healthy


def _onnxruntime_results() -> list[CheckResult]:
    from ..backends.loading import check_onnxruntime

    try:
        problem = check_onnxruntime()
    except BackendError as error:  # a note, because other backends run without ONNX Runtime
        return [CheckResult("ONNX Runtime", str(error), "note")]
    return [CheckResult("ONNX Runtime", problem, "warning")] if problem else []
