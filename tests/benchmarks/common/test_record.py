"""Rendering of a record: terminal, Markdown page, PNG and JSON, for every benchmark."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from maskrcnn_trt.benchmarks.common import record as record_module
from maskrcnn_trt.benchmarks.common.machine import MachineInfo
from maskrcnn_trt.benchmarks.common.record import (
    PlotGrid,
    Record,
    ResultTable,
    format_significant,
    publish,
    write_record,
)

H100 = MachineInfo("a CPU", 16, ("NVIDIA H100 80GB HBM3 (driver 580.1)",), "3.12", {"torch": "2"})


@dataclass
class Result:
    rate: float
    steps: dict[str, float]


def record(**changes: object) -> Record:
    table = ResultTable(
        heading="Speed",
        columns=("engine", "batch", "rate", "unused"),
        rows=[("torch", "8", "1.5", ""), ("onnx", "8", "2.5", "")],
        remarks=["eager [ran] out of memory"],
        optional_column="batch",
    )
    values = {
        "subject": "speed",
        "title": "Speed of engines",
        "results": [Result(1.5, {"a": 1.0}), Result(2.5, {})],
        "tables": [table, ResultTable(heading="Hidden", columns=("x",), rows=[("y",)],
                                      on_terminal=False)],
        "plots": PlotGrid(
            alt="Speeds", plots=[lambda axes: axes.plot([1, 2])] * 3, columns=2, size=(3, 2)
        ),
        "notes": ["A note of many words. " * 20, {"rate": "images per second"}],
        "on_gpu": True,
        "details": {"extra": Result(3.0, {})},
        "command": "maskrcnn bench speed",
        "measured_at": "2026-11-23T00:00:00+00:00",
        "machine": H100,
    }  # fmt: skip
    return Record(**(values | changes))


def test_files_of_a_record(tmp_path: Path):
    page = write_record(record(goals=["The goal is met."]), tmp_path / "new")
    assert page.name == "speed-h100-202611.md"
    text = page.read_text()
    for part in (
        "# Speed of engines\n",
        "```sh\nmaskrcnn bench speed\n```",
        "| GPU | NVIDIA H100 80GB HBM3 (driver 580.1) |",
        "## Goals\n\n- The goal is met.\n",
        "| onnx | 8 | 2.5 |  |",
        "- eager [ran] out of memory",
        "| y |",
        "| column | meaning |\n| --- | --- |\n| rate | images per second |",
        "![Speeds](speed-h100-202611.png)",
    ):
        assert part in text
    assert max(map(len, text.split("## Method")[1].splitlines())) <= 100
    with Image.open(page.with_suffix(".png")) as image:
        assert image.size == (720, 480)
    content = json.loads(page.with_suffix(".json").read_text())
    assert list(content) == ["results", "command", "measured_at", "machine", "extra"]
    assert content["results"][0] == {"rate": 1.5, "steps": {"a": 1.0}}


def test_record_of_a_cpu(tmp_path: Path):
    cpu = MachineInfo("a CPU", 2, (), "3.12", {})
    page = write_record(record(machine=cpu, on_gpu=False), tmp_path)
    assert page.name == "speed-cpu-202611.md"
    text = page.read_text()
    assert "none, the CPU" in text
    assert "## Goals" not in text


def test_terminal_omits_columns_without_information(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    publish(record(), tmp_path / "new" / "speed.json")
    out = capsys.readouterr().out
    assert "torch" in out
    assert "eager [ran] out of memory" in out
    for absent in ("batch", "unused", "Hidden"):
        assert absent not in out
    assert json.loads((tmp_path / "new" / "speed.json").read_text())["extra"]["rate"] == 3.0


def test_partial_record_does_not_replace_a_complete_one(tmp_path: Path):
    publish(record(), folder=tmp_path)
    complete = {path: path.read_bytes() for path in tmp_path.iterdir()}
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        publish(record(), folder=tmp_path)
    assert {path: path.read_bytes() for path in complete} == complete
    new = set(tmp_path.iterdir()) - complete.keys()
    assert {path.name for path in new} == {
        f"speed-partial-h100-202611.{suffix}" for suffix in ("md", "json", "png")
    }


def test_commit_is_not_that_of_another_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The package can be installed in the environment of a project with a Git repository."""
    own = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init"], ["commit", "--allow-empty", "--message=a"]):
        subprocess.run([*own, *command], check=True, capture_output=True)
    monkeypatch.setattr(record_module, "__file__", str(tmp_path / "record.py"))
    page = write_record(record(), tmp_path)
    assert "| commit | unknown |" in page.read_text()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.00512, "0.00512"), (0.4567, "0.457"), (7.231, "7.23"), (999.94, "1000"),
     (12345.6, "12346")],
)  # fmt: skip
def test_numbers_have_three_significant_digits(value: float, text: str):
    assert format_significant(value) == text


def test_command_of_a_record_has_no_credentials(monkeypatch: pytest.MonkeyPatch):
    words = ["maskrcnn", "bench", "train", "1x", "weights=https://me:secret@host/a.pth", "a@b"]
    monkeypatch.setattr(sys, "argv", words)
    recorded = Record(**{k: v for k, v in vars(record()).items() if k != "command"})
    assert recorded.command == "maskrcnn bench train 1x weights=https://host/a.pth a@b"
