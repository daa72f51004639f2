"""Checks of `serve --doctor` with real bundles, ports and a trial start."""

import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from maskrcnn_trt.serving.commands.doctor import CheckResult, CheckSection, diagnose
from maskrcnn_trt.serving.commands.serve import serve
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.host import available_memory

DEFAULTS = dict.fromkeys(ServeConfig.model_fields, "the default")


def examine(bundle: Path, **settings: object) -> dict[str, dict[str, CheckResult]]:
    """Return the results by section and subject."""
    config = ServeConfig.model_validate({"port": 0, **settings})
    sections = list(diagnose(bundle, config, DEFAULTS))
    return {section.title: {r.subject: r for r in section.results} for section in sections}


def faults_in(sections: dict[str, dict[str, CheckResult]]) -> list[str]:
    results = (result for section in sections.values() for result in section.values())
    return [result.text for result in results if result.state == "fault"]


def run(*words: object) -> Result:
    return CliRunner().invoke(serve, [*map(str, words), "--doctor"], env={"COLUMNS": "300"})


@pytest.fixture
def damaged(bundle: Path, tmp_path: Path) -> Path:
    """Return a bundle with a truncated file."""
    path = tmp_path / "damaged"
    shutil.copytree(bundle, path)
    artifact = sorted(path.glob("*.onnx"))[0]
    artifact.write_bytes(artifact.read_bytes()[:-1])
    return path


@pytest.fixture
def occupied_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_report_on_a_valid_bundle(bundle: Path) -> None:
    result = run(bundle, "--port", 0, "--max-batch", 2)
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for line in (
        "ok max_batch 2, by option",
        "ok queue_size 256, the default",
        "ok onnxruntime would be used",
        "ok port any free port",
    ):
        assert line in lines
    assert any("onnx in fp32 for 96x160, checksum matches" in line for line in lines)
    assert any(line.startswith("note torch not used: the bundle has no") for line in lines)
    assert any("ok start a server started" in line for line in lines)


@pytest.mark.slow
def test_reason_against_a_faster_backend_is_reported(
    torch_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    report = examine(torch_bundle)
    backends = report["Backends in fp32"]
    assert backends["torch"].state == "note"
    assert 'pip install "maskrcnn-trt[torch]"' in backends["torch"].text
    assert backends["onnxruntime"] == CheckResult("onnxruntime", "would be used")
    assert report["Trial"]["start"].state == "ok"


def test_requested_backend_must_be_available(bundle: Path) -> None:
    report = examine(bundle, backend="tensorrt")
    (fault,) = faults_in(report)
    assert "the bundle has no fp32 tensorrt artifact" in fault
    assert report["Backends in fp32"]["onnxruntime"].text == "not used: tensorrt is set"
    assert "Trial" not in report


def test_broken_installation_is_reported(
    torch_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    report = examine(torch_bundle, backend="onnxruntime")
    assert "OSError: libcudart.so.13" in report["Backends in fp32"]["torch"].text
    assert not faults_in(report)


def test_damaged_file_is_reported_and_the_trial_left_out(damaged: Path) -> None:
    report = examine(damaged)
    (fault,) = faults_in(report)
    assert ".onnx" in fault
    assert "Trial" not in report


def test_folder_without_a_manifest(tmp_path: Path) -> None:
    result = run(tmp_path, "--port", 0)
    assert result.exit_code == 1
    assert "manifest.json" in result.stdout


def test_occupied_port(bundle: Path, occupied_port: int) -> None:
    for name in ("port", "metrics_port"):
        report = examine(bundle, **{name: occupied_port})
        assert report["Limits"][name].state == "fault"
        assert f"127.0.0.1:{occupied_port}" in report["Limits"][name].text
        assert "Trial" not in report


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs dual-stack sockets")
def test_occupied_port_of_the_other_address_family(bundle: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as listening:
        port = listening.getsockname()[1]
        report = examine(bundle, host="::", port=port)
    assert any(str(port) in fault for fault in faults_in(report))


def test_missing_precision(bundle: Path) -> None:
    report = examine(bundle, precision=["fp32", "fp16"])
    assert not faults_in({"fp32": report["Backends in fp32"]})
    assert "the bundle has no fp16 onnx artifact" in faults_in(report)[0]


def test_fault_that_only_the_trial_shows(bundle: Path, tmp_path: Path) -> None:
    report = examine(bundle, token_file=tmp_path / "absent")
    assert report["Trial"]["start"].state == "fault"
    assert "absent" in report["Trial"]["start"].text


def limits_of(bundle: Path, **settings: object) -> dict[str, CheckResult]:
    sections = diagnose(bundle, ServeConfig.model_validate({"port": 0, **settings}), DEFAULTS)
    limits = next(section for section in sections if section.title == "Limits")
    return {result.subject: result for result in limits.results}


def test_settings_beyond_the_machine_are_warnings(bundle: Path) -> None:
    report = limits_of(bundle, threads=10_000, queue_size=1_000_000)
    assert (report["threads"].state, report["memory"].state) == ("warning", "warning")


def test_memory_check_includes_messages_being_received(bundle: Path) -> None:
    report = limits_of(bundle, queue_size=256, max_message_mb=64)["memory"]
    assert "64.0 GiB (4 x queue_size x max_message_mb)" in report.text
    mebibytes = available_memory() >> 20
    # Half of the available memory, and a sixth, counted by slots alone.
    assert limits_of(bundle, queue_size=mebibytes // 2, max_message_mb=1)["memory"].state == (
        "warning"
    )
    assert limits_of(bundle, queue_size=mebibytes // 6, max_message_mb=1)["memory"].state == "ok"


def test_only_faults_make_a_section_unhealthy() -> None:
    results = [CheckResult(state, "text", state) for state in ("ok", "note", "warning")]
    assert CheckSection("all", results).is_healthy
    assert not CheckSection("all", [*results, CheckResult("d", "d", "fault")]).is_healthy
