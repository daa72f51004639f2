"""`maskrcnn doctor`: steps in processes of their own, and the page on them."""

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from maskrcnn_trt.export.engines.commands import table_of_types
from maskrcnn_trt.export.engines.layers import Layer, LayerTensor
from maskrcnn_trt.serving.commands.doctor import STEPS, FirstRunStep, doctor, run_steps

ROOT = Path(__file__).parents[3]


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "report"


def test_page_has_the_same_steps() -> None:
    page = (ROOT / "export/engines/README.md").read_text()
    (*_, block) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    commands = block.replace("\\\n", "").splitlines()
    assert list(map(shlex.split, commands)) == [shlex.split(c) for s in STEPS for c in s.commands]
    rows = re.findall(r"^\| (\d+) \| `.*?` \| (.*) \|$", page, re.MULTILINE)
    assert rows == [(str(n), step.must_print) for n, step in enumerate(STEPS, 1)]


@pytest.mark.parametrize(
    ("gpus", "fact"), [((), "NVIDIA GPU"), (("a GPU",), "checkout of the repository")]
)
def test_steps_do_not_begin_where_they_cannot_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...], fact: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("maskrcnn_trt.serving.commands.doctor.gpu_names", lambda: gpus)
    result = CliRunner().invoke(doctor, ["--tensorrt"])
    assert result.exit_code == 1
    assert fact in result.output
    assert list(tmp_path.iterdir()) == []


def test_first_step_needs_the_steps() -> None:
    result = CliRunner().invoke(doctor, ["--from", "1"])
    assert result.exit_code == 2
    assert "--tensorrt" in result.output


def test_first_step_without_tensorrt(report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maskrcnn_trt.serving.commands.doctor.gpu_names", lambda: ("a GPU",))
    (report.parent / "tests" / "plugins").mkdir(parents=True)
    result = CliRunner().invoke(doctor, ["--tensorrt"])
    assert result.exit_code == 1
    assert "Python" in result.output  # the section on the machine
    for fact in ("1/10 pip install", "cuda-bindings", "names step 1", "--from 1"):
        assert fact in result.output
    assert "2/10" not in result.output
    folder = report.parent / "runs/first/report"
    assert "pytest " in (folder / "machine.txt").read_text()


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (FirstRunStep(("json.tool --help",), "", ("usage",)), ""),
        (FirstRunStep(("json.tool --help",), "", ("usage", "absent")), "absent"),
        (FirstRunStep(("json.tool --help",), "", fault="usage"), "usage"),
        (FirstRunStep(("json.tool none.json",), "", file="kept.log"), "exit code"),
        (FirstRunStep(("json.tool --help",), "", file="kept.log"), ""),
        (FirstRunStep(("json.tool same.json", "json.tool near.json"), ""), ""),
        (FirstRunStep(("json.tool same.json", "json.tool far.json"), ""), "0.4000 and 0.4100"),
    ],
)
def test_steps_stop_at_the_first_failure(
    report: Path, capsys: pytest.CaptureFixture[str], step: FirstRunStep, problem: str
) -> None:
    for name, ap in {"same": 0.4, "near": 0.404, "far": 0.41}.items():
        Path(f"{name}.json").write_text(json.dumps({"metrics": {"bbox/AP": ap}}))
    Path("kept.log").write_text("log")
    assert run_steps([step._replace(must_print="a fact")] * 2, report) == (not problem)
    output = capsys.readouterr().out
    assert ("2/2" in output) == (not problem)
    assert (f"{problem}" in output and "must print: a fact" in output) == bool(problem)
    assert (report / "kept.log").exists() == bool(step.file)
    assert step.commands[0] in (report / "01.txt").read_text()


def test_first_of_the_steps(report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_steps(
        [FirstRunStep(("json.tool none",), ""), FirstRunStep(("json.tool --help",), "")], report, 2
    )
    assert "1/2" not in capsys.readouterr().out


def test_patterns_match_the_tables() -> None:
    console = Console(width=200, no_color=True)
    layer = Layer("c1", "correlation", (LayerTensor("x", (1, 3, 8, 8), "fp16"),), ())
    with console.capture() as capture:
        console.print(table_of_types([layer]))
    assert re.search(STEPS[5].patterns[-1], capture.get())
