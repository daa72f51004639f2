"""Examples of the page on other clients, run as they are printed."""

import base64
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpcurl
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from http_server import HttpAddress, served_over_http
from triton_requests import MODEL

import maskrcnn_trt.serving
from maskrcnn_trt.protos.inference import open_inference_pb2 as inference
from maskrcnn_trt.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from maskrcnn_trt.serving.client import DetectorClient

PAGE = (Path(maskrcnn_trt.serving.__file__).parent / "deploy" / "other-clients.md").read_text()
SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"^## ", PAGE, flags=re.M)}


def blocks(section: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", SECTIONS[section], re.M | re.S)


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[HttpAddress]:
    with served_over_http(bundle) as server:
        yield server


@pytest.fixture(scope="module")
def address(server: HttpAddress) -> str:
    return server.grpc


@pytest.fixture
def folder(tmp_path: Path, picture: Callable[..., bytes]) -> Path:
    """Return a folder with the image that the page's examples use."""
    (tmp_path / "street.jpg").write_bytes(picture())
    return tmp_path


def output(folder: Path, address: str, *command: str, **variables: str) -> str:
    """Run a command of the page with the test server's address. Return its output."""
    words = [word.replace("localhost:8500", address) for word in command]
    run = subprocess.run(
        words, cwd=folder, env=variables or None, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def with_changed_lines(example: str, changes: str) -> str:
    """Replace the lines of an example that begin as a changed line does."""
    for line in filter(None, changes.splitlines()):
        start = re.escape(re.split(r"[.(=]", line)[0])
        example, count = re.subn(f"^{start}.*", lambda _, line=line: line, example, flags=re.M)
        assert count == 1
    return example


@pytest.mark.parametrize("over_http", [False, True])
def test_tritonclient_gets_the_same_detections_as_our_client(
    server: HttpAddress, folder: Path, over_http: bool
) -> None:
    example, changes = blocks("tritonclient", "python")
    if over_http:
        example = with_changed_lines(example, changes)
        example = example.replace("localhost:8080", server.url.removeprefix("http://"))
    lines = output(folder, server.grpc, sys.executable, "-c", example).splitlines()
    with DetectorClient(server.grpc) as client:
        found = client.detect(folder / "street.jpg")
    expected = [
        (name, f"{score:.5f}")
        for name, score in zip(found.class_names, found.scores, strict=True)
        if score > 0.3
    ]
    assert expected
    assert [(name, f"{float(s):.5f}") for name, s, *_ in map(str.split, lines)] == expected


def test_grpcurl_commands(address: str, folder: Path) -> None:
    (lines,) = blocks("grpcurl", "sh")
    program = folder / "grpcurl"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{grpcurl.__file__}" "$@"\n')
    program.chmod(0o755)
    path = f"{folder}:/usr/bin:/bin"
    listed, described, *results = (
        output(folder, address, "bash", "-c", command, PATH=path, MODEL=MODEL)
        for command in re.split(r"\n(?=grpcurl|printf)", lines.strip())
    )
    assert {"maskrcnn.v1.Detector", "inference.GRPCInferenceService"} <= {*listed.split()}
    assert "score_threshold" in described.split()
    model, health, detected, inferred = map(json.loads, results)
    assert model["name"] == MODEL
    assert health == {"status": "SERVING"}
    assert all(found["score"] > 0.3 for found in detected["detections"])
    names = [tensor["name"] for tensor in inferred["outputs"]]
    count = inferred["rawOutputContents"][names.index("num_detections")]
    assert int.from_bytes(base64.b64decode(count), "little") >= len(detected["detections"]) > 0


def test_grpc_health_probe_commands(address: str) -> None:
    (lines,) = blocks("grpc_health_probe", "sh")
    with grpc.insecure_channel(address) as channel:
        for line in lines.splitlines():
            name = re.fullmatch(r"grpc_health_probe -addr=\S+(?: -service=(\S+))?", line)[1]
            answer = HealthStub(channel).Check(HealthCheckRequest(service=name or ""), timeout=60)
            assert answer.status == HealthCheckResponse.SERVING


def test_perf_analyzer_requests(address: str, folder: Path) -> None:
    (program,) = blocks("perf_analyzer", "python")
    output(folder, address, sys.executable, "-c", program)
    (example,) = json.loads((folder / "requests.json").read_text())["data"]
    ((name, content),) = example.items()
    # Concatenated, as the tool does to form a batch.
    tensor = inference.ModelInferRequest.InferInputTensor(name=name, datatype="BYTES", shape=[2, 1])
    request = inference.ModelInferRequest(
        model_name=MODEL, inputs=[tensor], raw_input_contents=[2 * base64.b64decode(content["b64"])]
    )
    with grpc.insecure_channel(address) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        answer = stub.ModelInfer(request, timeout=60)
    assert [tensor.shape[0] for tensor in answer.outputs] == len(answer.outputs) * [2]
