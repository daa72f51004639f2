"""Container image, built from the Dockerfile and run as in production."""

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from container_engine import Buildah, Docker, built_image
from http_server import free_port

from maskrcnn_trt.serving.client import DetectorClient
from maskrcnn_trt.serving.detections import DetectionOptions

pytestmark = [pytest.mark.image, pytest.mark.slow, pytest.mark.timeout(680)]


@pytest.fixture(scope="module", params=["cpu,http", "gpu,http"])
def image(request: pytest.FixtureRequest) -> Iterator[Docker | Buildah]:
    """Serving image. Without a GPU, ONNX Runtime's GPU package uses the CPU."""
    with built_image("serving", request.param) as image:
        yield image


@pytest.fixture
def run(image: Docker | Buildah, bundle: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Function that runs a program in the image."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = image.command(bundle, words)
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    return run


@contextlib.contextmanager
def served(image: Docker | Buildah, bundle: Path, ports: Sequence[int]) -> Iterator[None]:
    """Run the server of the image, and stop it as a container engine does."""
    (entrypoint,) = image.configuration["Entrypoint"]
    names = ("--port", "--http-port", "--metrics-port")
    options = [str(word) for pair in zip(names, ports, strict=True) for word in pair]
    command = image.command(bundle, [entrypoint, *image.configuration["Cmd"], *options])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "Ready" in process.stdout.readline()
            yield
            process.terminate()
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


def test_image_serves_grpc_and_http(
    image: Docker | Buildah, bundle: Path, picture: Callable[..., bytes], run: Callable[..., object]
) -> None:
    ports = [free_port() for _ in range(3)]
    grpc, http, metrics = ports
    with served(image, bundle, ports):
        options = DetectionOptions(score_threshold=0)
        with DetectorClient(f"localhost:{grpc}", timeout_s=60) as client:
            expected = client.detect(picture(), options)
        assert len(expected) > 0
        url = f"http://localhost:{http}/v1/detect?score_threshold=0"
        found = httpx.post(url, content=picture(), timeout=60).raise_for_status().json()
        assert len(found["detections"]) == len(expected)
        assert "<html" in httpx.get(f"http://localhost:{http}/").text
        text = httpx.get(f"http://localhost:{metrics}/metrics").text
        assert f'maskrcnn_connections{{port="{http}"}}' in text
        health = [*image.configuration["Healthcheck"]["Test"][1:], f"localhost:{grpc}"]
        assert run(*health).returncode == 0
    assert run(*health).returncode == 1


def test_image_needs_neither_root_nor_a_writable_file_system(
    image: Docker | Buildah, run: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    assert image.configuration["User"] == "maskrcnn"
    program = "import os; print(os.getuid()); open('/home/maskrcnn/file', 'w')"
    result = run("python", "-c", program)
    assert result.stdout == "1000\n"
    assert "Read-only file system" in result.stderr


def test_image_lists_its_packages(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    bill = json.loads(run("cat", "/opt/maskrcnn/sbom.json").stdout)
    assert bill["bomFormat"] == "CycloneDX"
    program = "import importlib.metadata as m; print(*{d.name for d in m.distributions()})"
    installed = run("/opt/maskrcnn/bin/python", "-c", program).stdout.split()
    assert {component["name"] for component in bill["components"]} == set(installed)
    assert {"maskrcnn-trt", "uvicorn"} <= set(installed)
    assert not {"pip", "torch"} & set(installed)


_TRAINING = """
set -e
cd /tmp
maskrcnn data synthetic data --train 4 --val 1 --size 192x128
for split in train val; do
    set -- "$@" data.$split.images=data/$split data.$split.annotations=data/annotations/$split.json
done
maskrcnn train quick output_dir=run solver.max_iterations=1 'solver.steps=[]' "$@"
maskrcnn export run/model_final.pth -o bundle --precision fp32
maskrcnn predict bundle data/val -o detections
cat detections/detections.json
"""


def test_training_image_trains_exports_and_predicts(bundle: Path) -> None:
    with built_image("training") as image:
        assert image.configuration["User"] == "maskrcnn"
        command = image.command(bundle, ["sh", "-c", _TRAINING])
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert isinstance(json.loads(run.stdout[run.stdout.rindex("\n[") :]), list)
