"""Bundles that change and servers that stop, while a real client asks without a pause."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from maskrcnn_trt.model.manifest import read_manifest, write_manifest
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub

Encode = Callable[..., bytes]
Process = subprocess.Popen[str]


@pytest.fixture
def own_bundle(bundle: Path, tmp_path: Path) -> Path:
    """A bundle that the test may change, in fp32 and, by the same file, tf32."""
    path = tmp_path / "bundle"
    shutil.copytree(bundle, path)
    manifest = read_manifest(path)
    second = tuple(a.model_copy(update={"precision": "tf32"}) for a in manifest.artifacts)
    write_manifest(path, manifest.model_copy(update={"artifacts": manifest.artifacts + second}))
    return path


@contextlib.contextmanager
def server_process(bundle: Path, log: Path) -> Iterator[tuple[Process, str]]:
    """A server of both precisions, its address, and its log in a file."""
    command = [sys.executable, "-m", "maskrcnn_trt", "serve", str(bundle), "--port", "0"]
    options = ["--precision", "fp32", "--precision", "tf32", "--drain-delay-s", "2"]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command + options, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        match = re.search(r"Ready at (\S+:\d+)", process.stdout.readline())
        assert match, log.read_text()
        yield process, match[1]
        process.kill()


class Load:
    """Clients in threads that ask without a pause, in both precisions."""

    def __init__(self, stub: Any, image: bytes) -> None:
        self.answered = 0
        self.failures: list[grpc.RpcError] = []
        self._stub = stub
        self._image = image
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(precision,))
            for precision in ("fp32", "tf32", "fp32")
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def goes_on(self) -> None:
        """Wait for some more answers."""
        enough = self.answered + 10
        wait_until(lambda: bool(self.failures) or self.answered >= enough)

    def _ask(self, precision: str) -> None:
        while not self._stopping.is_set():
            request = pb.DetectRequest(image=self._image, precision=precision)
            try:
                assert self._stub.Detect(request, timeout=60).detections
                self.answered += 1
            except grpc.RpcError as error:
                self.failures.append(error)
                return


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_reload_under_load(own_bundle: Path, tmp_path: Path, picture: Encode) -> None:
    log = tmp_path / "log"
    with server_process(own_bundle, log) as (process, address), grpc.insecure_channel(address) as c:
        stub: Any = DetectorStub(c)

        def model() -> pb.GetModelResponse:
            return stub.GetModel(pb.GetModelRequest(), timeout=60)

        assert model().precisions == ["fp32", "tf32"]
        with pytest.raises(grpc.RpcError, match="computes in fp32, tf32"):
            stub.Detect(pb.DetectRequest(image=picture(), precision="fp16"), timeout=60)
        manifest = read_manifest(own_bundle)
        with Load(stub, picture()) as load:
            load.goes_on()
            write_manifest(own_bundle, manifest.model_copy(update={"model_name": "newer"}))
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: model().name == "newer")
            load.goes_on()

            damaged = own_bundle / "damaged"
            damaged.write_bytes((own_bundle / manifest.artifacts[0].path).read_bytes()[:-100])
            os.replace(damaged, own_bundle / manifest.artifacts[0].path)
            write_manifest(own_bundle, manifest.model_copy(update={"model_name": "damaged"}))
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: "not reloaded, and the old one serves on" in log.read_text())
            load.goes_on()
            assert model().name == "newer"
        assert load.failures == []
    assert "Traceback" not in log.read_text()


def test_stop_under_load(own_bundle: Path, tmp_path: Path, picture: Encode) -> None:
    log = tmp_path / "log"
    with server_process(own_bundle, log) as (process, address), grpc.insecure_channel(address) as c:
        health = HealthStub(c).Watch(HealthCheckRequest(), timeout=60)
        assert next(health).status == HealthCheckResponse.SERVING
        with Load(DetectorStub(c), picture()) as load:
            load.goes_on()
            process.send_signal(signal.SIGTERM)
            assert next(health).status == HealthCheckResponse.NOT_SERVING
        assert load.failures == []
        assert process.wait(timeout=60) == 0
    assert "Traceback" not in log.read_text()
