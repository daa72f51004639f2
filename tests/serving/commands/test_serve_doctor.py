"""Checks of `serve --doctor` with real bundles, ports and a trial start."""

import datetime
import os
import socket
import sys
from pathlib import Path

import pytest
import trustme
from bundle_copies import linked_copy
from click.testing import CliRunner, Result

from maskrcnn_trt.model.bundle.manifest import read_manifest, sha256_of, write_manifest
from maskrcnn_trt.model.host_resources import available_memory
from maskrcnn_trt.serving.commands.doctor import CheckResult, CheckSection, show
from maskrcnn_trt.serving.commands.serve import serve
from maskrcnn_trt.serving.commands.serve_doctor import diagnose
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.pipeline.served_model import ModelSource

DEFAULTS = dict.fromkeys(ServeConfig.model_fields, "the default")


def examine(bundle: Path, **settings: object) -> dict[str, dict[str, CheckResult]]:
    """Return the results by section and subject."""
    config = ServeConfig.model_validate({"port": 0, **settings})
    sections = list(diagnose([ModelSource(bundle)], config, DEFAULTS))
    return {section.title: {r.subject: r for r in section.results} for section in sections}


def section_of(bundle: Path, title: str, **settings: object) -> dict[str, CheckResult]:
    """Return the results of one section. The sections after it are not examined."""
    config = ServeConfig.model_validate({"port": 0, **settings})
    sections = diagnose([ModelSource(bundle)], config, DEFAULTS)
    section = next(section for section in sections if section.title == title)
    return {result.subject: result for result in section.results}


def faults_in(sections: dict[str, dict[str, CheckResult]]) -> list[str]:
    results = (result for section in sections.values() for result in section.values())
    return [result.text for result in results if result.state == "fault"]


def run(*words: object) -> Result:
    return CliRunner().invoke(serve, [*map(str, words), "--doctor"], env={"COLUMNS": "300"})


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


def test_reasons_against_a_faster_backend_are_reported(
    torch_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    backends = section_of(torch_bundle, "Backends in fp32")
    assert backends["torch"].state == "note"
    assert 'pip install "maskrcnn-trt[torch]"' in backends["torch"].text
    assert backends["onnxruntime"] == CheckResult("onnxruntime", "would be used")

    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    backends = section_of(torch_bundle, "Backends in fp32", backend="onnxruntime")
    assert "cannot import torch (libcudart.so.13" in backends["torch"].text
    assert not faults_in({"": backends})


def test_missing_onnxruntime_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    result = section_of(tmp_path, "Machine")["ONNX Runtime"]
    assert result.state == "note"
    assert '"maskrcnn-trt[gpu]"' in result.text


def test_requested_backend_must_be_available(bundle: Path) -> None:
    report = examine(bundle, backend="tensorrt")
    (fault,) = faults_in(report)
    assert "the bundle has no fp32 tensorrt artifact" in fault
    assert report["Backends in fp32"]["onnxruntime"].text == "not used: tensorrt is set"
    assert "Trial" not in report


def test_damaged_file_is_reported_and_the_trial_left_out(bundle: Path, tmp_path: Path) -> None:
    damaged = linked_copy(bundle, tmp_path / "damaged")
    artifact = sorted(damaged.glob("*.onnx"))[0]
    content = artifact.read_bytes()
    artifact.unlink()
    artifact.write_bytes(content[:-1])
    report = examine(damaged)
    (fault,) = faults_in(report)
    assert ".onnx" in fault
    assert "Trial" not in report


def test_folder_without_a_manifest(tmp_path: Path) -> None:
    result = run(tmp_path, "--port", 0)
    assert result.exit_code == 1
    assert "manifest.json" in result.stdout


def test_occupied_port(bundle: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        for name in ("port", "metrics_port"):
            report = examine(bundle, **{name: port})
            assert report["Limits"][name].state == "fault"
            assert f"127.0.0.1:{port}" in report["Limits"][name].text
            assert "Trial" not in report


def test_certificates(bundle: Path, tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    settings = {"tls_certificate": certificate, "tls_key": key}
    now = datetime.datetime.now(datetime.UTC)
    for days, state in ((-1, "fault"), (3, "warning"), (30, "ok")):
        issued = trustme.CA().issue_cert("localhost", not_after=now + datetime.timedelta(days=days))
        issued.cert_chain_pems[0].write_to_path(certificate)
        issued.private_key_pem.write_to_path(key)
        assert section_of(bundle, "Limits", **settings)["tls_certificate"].state == state
    key.unlink()
    assert section_of(bundle, "Limits", **settings)["tls_certificate"].state == "fault"


def test_token_files(tmp_path: Path) -> None:
    valid, invalid = tmp_path / "valid", tmp_path / "invalid"
    valid.write_text("first\nsecond\n")
    invalid.write_text("two words\n")
    limits = section_of(tmp_path, "Limits", token_file=valid, admin_token_file=invalid)
    assert limits["token_file"] == CheckResult("token_file", "2 valid tokens")
    assert limits["admin_token_file"].state == "fault"
    assert f"line 1 of {invalid}" in limits["admin_token_file"].text


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs dual-stack sockets")
def test_occupied_port_of_the_other_address_family(bundle: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)) as listening:
        port = listening.getsockname()[1]
        limits = section_of(bundle, "Limits", host="::", port=port)
    assert str(port) in limits["port"].text
    assert limits["port"].state == "fault"


def test_missing_precision(bundle: Path) -> None:
    report = examine(bundle, precision=["fp32", "fp16"])
    assert not faults_in({"fp32": report["Backends in fp32"]})
    assert "the bundle has no fp16 onnx artifact" in faults_in(report)[0]


def test_fault_that_only_the_trial_shows(bundle: Path, tmp_path: Path) -> None:
    folder, manifest = linked_copy(bundle, tmp_path / "bundle"), read_manifest(bundle)
    artifact = manifest.artifacts[0]
    graph = folder / artifact.path
    for link in (graph, folder / "manifest.json"):
        link.unlink()
    graph.write_bytes(b"not a graph")
    artifact = artifact.model_copy(update={"sha256": sha256_of(graph)})
    write_manifest(folder, manifest.model_copy(update={"artifacts": (artifact,)}))
    report = examine(folder)
    assert report["Trial"]["start"].state == "fault"
    assert artifact.path in report["Trial"]["start"].text


def test_settings_beyond_the_machine_are_warnings(bundle: Path) -> None:
    limits = section_of(bundle, "Limits", threads=10_000, queue_size=1_000_000)
    assert (limits["threads"].state, limits["memory"].state) == ("warning", "warning")


def test_memory_check_includes_messages_being_received(bundle: Path) -> None:
    def memory(queue_size: int, max_message_mb: int) -> CheckResult:
        settings = {"queue_size": queue_size, "max_message_mb": max_message_mb}
        settings["decode_memory_mb"] = 64
        return section_of(bundle, "Limits", **settings)["memory"]

    assert "64.0 GiB (4 x queue_size x max_message_mb)" in memory(256, 64).text
    mebibytes = available_memory() >> 20
    # Half of the available memory, and a sixth, counted by slots alone.
    assert memory(mebibytes // 2, 1).state == "warning"
    assert memory(mebibytes // 6, 1).state == "ok"


def test_names_that_are_not_utf_8_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    name = os.fsdecode(b"bundle\xff")
    assert show([CheckSection(name, [CheckResult(name, name)])])
    assert capsys.readouterr().out.count("bundle\ufffd") == 3


def test_only_faults_make_a_section_unhealthy() -> None:
    results = [CheckResult(state, "text", state) for state in ("ok", "note", "warning")]
    assert CheckSection("all", results).is_healthy
    assert not CheckSection("all", [*results, CheckResult("d", "d", "fault")]).is_healthy
