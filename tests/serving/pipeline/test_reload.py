"""Reload and shutdown of a server under load."""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from in_process_server import connected
from scraped_metrics import metrics_from_log
from server_load import Load, Process, memory_of, server_process, wait_until, worker_pids

from maskrcnn_trt.model.bundle.manifest import read_manifest, write_manifest
from maskrcnn_trt.protos.inference import open_inference_pb2 as inference
from maskrcnn_trt.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.client import DetectorClient
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.server import detection_server

Encode = Callable[..., bytes]

PRECISIONS = "--precision", "fp32", "--precision", "tf32"
BOTH = "fp32", "tf32", "fp32"
# Time in which clients see that the server stops, before it rejects requests.
DRAINING = "--drain-delay-s", "2"
TRITON = GRPCInferenceServiceStub
SERVING = HealthCheckResponse.SERVING
# Reloads after which files and threads are counted again.
RELOADS = 5
# Tolerance of the memory after these reloads, in bytes.
_SPARE_BYTES = 30 << 20


@pytest.fixture
def own_bundle(bundle: Path, tmp_path: Path) -> Path:
    """Copy of the bundle that the test may change. Precisions fp32 and tf32 share their files."""
    path = tmp_path / "bundle"
    shutil.copytree(bundle, path)
    manifest = read_manifest(path)
    second = tuple(a.model_copy(update={"precision": "tf32"}) for a in manifest.artifacts)
    write_manifest(path, manifest.model_copy(update={"artifacts": manifest.artifacts + second}))
    return path


@pytest.mark.slow
def test_reload_and_stop_under_load(own_bundle: Path, tmp_path: Path, picture: Encode) -> None:
    log = tmp_path / "log"
    with (
        server_process(own_bundle, log, *PRECISIONS, *DRAINING) as (process, address),
        grpc.insecure_channel(address) as c,
    ):
        stub: Any = DetectorStub(c)

        def model() -> pb.GetModelResponse:
            return stub.GetModel(pb.GetModelRequest(), timeout=60)

        def health(name: str) -> HealthCheckResponse:
            return HealthStub(c).Check(HealthCheckRequest(service=name), timeout=60)

        assert model().precisions == ["fp32", "tf32"]
        assert health(model().name).status == SERVING
        with pytest.raises(grpc.RpcError, match=r"(?s)NOT_FOUND.*choose from fp32, tf32"):
            stub.Detect(pb.DetectRequest(image=picture(), precision="fp16"), timeout=60)
        manifest = read_manifest(own_bundle)
        with Load(stub, picture(), BOTH) as load:
            load.wait_for_responses()
            write_manifest(own_bundle, manifest.model_copy(update={"model_name": "newer"}))
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: model().name == "newer")
            assert health("newer").status == health("newer-tf32").status == SERVING
            with pytest.raises(grpc.RpcError, match="unknown service"):
                health(manifest.model_name)
            load.wait_for_responses()

            damaged = own_bundle / "damaged"
            damaged.write_bytes((own_bundle / manifest.artifacts[0].path).read_bytes()[:-100])
            os.replace(damaged, own_bundle / manifest.artifacts[0].path)
            write_manifest(own_bundle, manifest.model_copy(update={"model_name": "damaged"}))
            process.send_signal(signal.SIGHUP)
            failed = "reloading the bundle of model newer failed, and the old model is still served"
            wait_until(lambda: failed in log.read_text())
            load.wait_for_responses()
            assert model().name == "newer"
            assert_stops(process, c, lambda: process.send_signal(signal.SIGTERM), load)
    assert "Traceback" not in log.read_text()


def test_stop_of_the_process_group_under_load(
    own_bundle: Path, tmp_path: Path, picture: Encode
) -> None:
    log = tmp_path / "log"
    with (
        server_process(own_bundle, log, *PRECISIONS, *DRAINING) as (process, address),
        grpc.insecure_channel(address) as c,
        Load(DetectorStub(c), picture(), BOTH) as load,
    ):
        load.wait_for_responses()
        assert_stops(process, c, lambda: os.killpg(process.pid, signal.SIGTERM), load)
    assert "Traceback" not in log.read_text()


def assert_stops(
    process: Process, channel: grpc.Channel, stop: Callable[[], None], load: Load
) -> None:
    """Stop a server with two workers and check that its load notices nothing but its health."""
    wait_until(lambda: len(worker_pids(process.pid)) == 2)  # those of a failed reload are gone
    workers = worker_pids(process.pid)
    health = HealthStub(channel).Watch(HealthCheckRequest(), timeout=60)
    assert next(health).status == SERVING
    stop()
    assert next(health).status == HealthCheckResponse.NOT_SERVING
    load.stop()
    assert load.failures == []
    assert process.wait(timeout=60) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_restarted_workers_load_the_original_files(
    own_bundle: Path, tmp_path: Path, picture: Encode
) -> None:
    """A link to the bundle is resolved at each reload, but not at a restart."""
    link, log = tmp_path / "current", tmp_path / "log"
    link.symlink_to(own_bundle)
    with (
        server_process(link, log) as (process, address),
        DetectorClient(address, timeout_s=60) as client,
    ):
        expected = client.detect(picture())
        link.unlink()
        link.symlink_to(tmp_path)  # not a bundle
        (worker,) = worker_pids(process.pid)
        os.kill(worker, signal.SIGKILL)
        restarted = f"-fp32 ({own_bundle.resolve()}) has restarted"
        wait_until(lambda: restarted in log.read_text())
        assert client.detect(picture()).rles == expected.rles


@pytest.mark.slow
def test_reloads_leak_nothing(own_bundle: Path, tmp_path: Path, picture: Encode) -> None:
    log = tmp_path / "log"
    with (
        server_process(own_bundle, log) as (process, address),
        DetectorClient(address, timeout_s=60) as client,
        grpc.insecure_channel(address) as c,
    ):
        stub: Any = GRPCInferenceServiceStub(c)
        request = inference.RepositoryModelLoadRequest(
            model_name=read_manifest(own_bundle).model_name
        )
        held = Path(f"/proc/{process.pid}")

        def reload() -> tuple[int, int, int]:
            """Reload, and return the numbers of files and threads, and the memory in bytes."""
            stub.RepositoryModelLoad(request, timeout=60)
            assert client.detect(picture()).rles
            files, threads = (len(os.listdir(held / name)) for name in ("fd", "task"))
            return files, threads, memory_of(process.pid)

        for _ in range(2):
            files, threads, memory = reload()
        for _ in range(RELOADS):
            *now, memory_now = reload()
        assert all(n < before + RELOADS for n, before in zip(now, (files, threads), strict=True))
        assert memory_now < memory + _SPARE_BYTES
        assert len(worker_pids(process.pid)) == 1


@pytest.mark.slow
async def test_shutdown_waits_for_requests_of_the_replaced_model(
    bundle: Path, picture: Encode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    name = read_manifest(bundle).model_name
    # The request waits for its batch to fill until long after the reload.
    config = ServeConfig(port=0, metrics_port=0, max_batch=64, max_delay_ms=20_000)
    async with contextlib.AsyncExitStack() as server:
        address = await server.enter_async_context(detection_server(bundle, config))
        metrics = metrics_from_log(caplog.text)
        async with connected(address) as detector, connected(address, TRITON) as triton:
            waiting = asyncio.ensure_future(detector.Detect(pb.DetectRequest(image=picture())))
            await metrics.becomes(1, "maskrcnn_requests_in_progress")
            load = inference.RepositoryModelLoadRequest(model_name=name)
            loading = triton.RepositoryModelLoad(load)
            await metrics.becomes(1, "maskrcnn_reloads_total", result="success")
            stopping = asyncio.create_task(server.aclose())
            assert await loading.code() is grpc.StatusCode.UNAVAILABLE
            assert (await waiting).detections
            await stopping
            assert not worker_pids(os.getpid())


@pytest.mark.parametrize("trigger", ["signal", "call"])
def test_shutdown_does_not_wait_for_a_reload(
    own_bundle: Path, tmp_path: Path, trigger: str
) -> None:
    log = tmp_path / "log"
    with (
        server_process(own_bundle, log) as (process, address),
        grpc.insecure_channel(address) as c,
    ):
        old = worker_pids(process.pid)
        if trigger == "signal":
            process.send_signal(signal.SIGHUP)
        else:
            stub: Any = GRPCInferenceServiceStub(c)
            name = read_manifest(own_bundle).model_name
            request = inference.RepositoryModelLoadRequest(model_name=name)
            call = stub.RepositoryModelLoad.future(request, timeout=60)
        wait_until(lambda: worker_pids(process.pid) - old)
        (new,) = worker_pids(process.pid) - old
        os.kill(new, signal.SIGSTOP)  # so that loading does not end
        process.send_signal(signal.SIGTERM)
        if trigger == "call":
            assert call.code() is grpc.StatusCode.UNAVAILABLE
        assert process.wait(timeout=60) == 0
    assert "Traceback" not in log.read_text()
