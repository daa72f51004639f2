"""What the doctor finds, with real bundles, ports and a server that is started and stopped."""

import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.doctor import Finding, Section, diagnose
from maskrcnn_trt.serving.host import available_memory
from maskrcnn_trt.serving.serve_command import serve

DEFAULTS = dict.fromkeys(ServeConfig.model_fields, "the default")


def examine(bundle: Path, **settings: object) -> dict[str, dict[str, Finding]]:
    """Findings by section and subject."""
    config = ServeConfig.model_validate({"port": 0, **settings})
    sections = list(diagnose(bundle, config, DEFAULTS))
    return {section.title: {f.subject: f for f in section.findings} for section in sections}


def faults_in(found: dict[str, dict[str, Finding]]) -> list[str]:
    findings = (finding for section in found.values() for finding in section.values())
    return [finding.text for finding in findings if finding.state == "fault"]


def run(*words: object) -> Result:
    return CliRunner().invoke(serve, [*map(str, words), "--doctor"], env={"COLUMNS": "300"})


@pytest.fixture
def damaged(bundle: Path, tmp_path: Path) -> Path:
    """The bundle with a file of it cut short."""
    path = tmp_path / "damaged"
    shutil.copytree(bundle, path)
    artifact = sorted(path.glob("*.onnx"))[0]
    artifact.write_bytes(artifact.read_bytes()[:-1])
    return path


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_bundle_that_can_be_served_is_told_from_all_sides(bundle: Path) -> None:
    result = run(bundle, "--port", 0, "--max-batch", 2)
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for line in (
        "ok max_batch 2, by option",
        "ok queue_size 256, the default",
        "ok onnxruntime would be used",
        "ok port any that is free",
    ):
        assert line in lines
    assert any("onnx in fp32 for 96x160, as it was exported" in line for line in lines)
    assert any(line.startswith("note torch not used, since the bundle has no") for line in lines)
    assert any("a server was ready, warm and stopped" in line for line in lines)


def test_why_a_faster_backend_is_not_used(
    torch_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = examine(torch_bundle)
    backends = found["Backends in fp32"]
    assert backends["torch"].state == "note"
    assert 'torch is not installed; install it with pip install "maskrcnn-trt[torch]"' in (
        backends["torch"].text
    )
    assert backends["onnxruntime"] == Finding("onnxruntime", "would be used")
    assert found["Trial"]["start"].state == "ok"


def test_backend_that_is_asked_for_is_held_to_it(bundle: Path) -> None:
    found = examine(bundle, backend="tensorrt")
    (fault,) = faults_in(found)
    assert "the bundle has no fp32 tensorrt artefact" in fault
    assert found["Backends in fp32"]["onnxruntime"].text == (
        "not used, since tensorrt is asked for"
    )
    assert "Trial" not in found


def test_installation_that_is_broken_is_a_finding(
    torch_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    found = examine(torch_bundle, backend="onnxruntime")
    assert found["Backends in fp32"]["torch"].text == (
        "not used, since OSError: libcudart.so.13: no such file"
    )
    assert not faults_in(found)


def test_damaged_file_is_named_and_nothing_started(damaged: Path) -> None:
    found = examine(damaged)
    (fault,) = faults_in(found)
    assert "is not the file that was exported" in fault
    assert "Trial" not in found


def test_folder_that_is_no_bundle(tmp_path: Path) -> None:
    result = run(tmp_path, "--port", 0)
    assert result.exit_code == 1
    assert "is no bundle: it has no manifest.json" in result.stdout


def test_port_that_is_taken(bundle: Path, taken_port: int) -> None:
    for name in ("port", "metrics_port"):
        found = examine(bundle, **{name: taken_port})
        assert found["Limits"][name].state == "fault"
        assert f"127.0.0.1:{taken_port} cannot be had" in found["Limits"][name].text
        assert "Trial" not in found


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no socket here takes both families")
def test_port_that_is_taken_of_the_other_family(bundle: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as listening:
        port = listening.getsockname()[1]
        found = examine(bundle, host="::", port=port)
    assert any(str(port) in fault for fault in faults_in(found))


def test_precision_that_the_bundle_lacks(bundle: Path) -> None:
    found = examine(bundle, precision=["fp32", "fp16"])
    assert not faults_in({"fp32": found["Backends in fp32"]})
    assert "the bundle has no fp16 onnx artefact" in faults_in(found)[0]


def test_what_only_a_start_shows(bundle: Path, tmp_path: Path) -> None:
    found = examine(bundle, token_file=tmp_path / "absent")
    assert found["Trial"]["start"].state == "fault"
    assert "absent" in found["Trial"]["start"].text


def limits_of(bundle: Path, **settings: object) -> dict[str, Finding]:
    sections = diagnose(bundle, ServeConfig.model_validate({"port": 0, **settings}), DEFAULTS)
    limits = next(section for section in sections if section.title == "Limits")
    return {finding.subject: finding for finding in limits.findings}


def test_settings_that_ask_for_more_than_there_is_are_warnings(bundle: Path) -> None:
    found = limits_of(bundle, threads=10_000, queue_size=1_000_000)
    assert (found["threads"].state, found["memory"].state) == ("warning", "warning")


def test_memory_counts_messages_that_are_on_their_way(bundle: Path) -> None:
    found = limits_of(bundle, queue_size=256, max_message_mb=64)["memory"]
    assert "would take 64.0 GiB as they are sent, 4 times queue_size times" in found.text
    mebibytes = available_memory() >> 20
    # Those in progress alone would take half of what is there, or a sixth.
    assert limits_of(bundle, queue_size=mebibytes // 2, max_message_mb=1)["memory"].state == (
        "warning"
    )
    assert limits_of(bundle, queue_size=mebibytes // 6, max_message_mb=1)["memory"].state == "ok"


def test_only_faults_make_a_section_unhealthy() -> None:
    findings = [Finding("a", "a"), Finding("b", "b", "note"), Finding("c", "c", "warning")]
    assert Section("all", findings).is_healthy
    assert not Section("all", [*findings, Finding("d", "d", "fault")]).is_healthy
