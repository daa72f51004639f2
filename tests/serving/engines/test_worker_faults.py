"""Worker processes that end, hang or are killed, in servers in separate processes."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from bundle_copies import linked_copy
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from in_process_server import connected
from scraped_metrics import metrics_from_log
from server_load import (
    Load,
    server_process,
    starting_server,
    wait_until,
    worker_pids,
)
from triton_requests import MODEL, infer_request

from maskrcnn_trt.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.client import DetectorClient
from maskrcnn_trt.serving.errors import RefusedError

Encode = Callable[..., bytes]


def is_serving(channel: grpc.Channel) -> bool:
    answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=60)
    return bool(answer.status == HealthCheckResponse.SERVING)


def is_detected(client: DetectorClient, image: bytes) -> bool:
    """Return whether a request succeeds within the client's retries."""
    try:
        return bool(client.detect(image))
    except RefusedError as error:
        if error.code is not grpc.StatusCode.UNAVAILABLE:
            raise
        return False


@pytest.mark.slow
def test_a_killed_or_hanging_worker_is_restarted(
    wide_bundle: Path, tmp_path: Path, picture: Encode
) -> None:
    log = tmp_path / "log"
    with (
        server_process(wide_bundle, log, "--hang-timeout-s", "3") as (process, address),
        grpc.insecure_channel(address) as channel,
        DetectorClient(address) as client,
    ):
        stub: Any = DetectorStub(channel)
        with Load(stub, picture()) as load:
            load.wait_for_responses()
            for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP):
                (pid,) = worker_pids(process.pid)
                os.kill(pid, number)
                wait_until(lambda: not is_serving(channel))
                wait_until(lambda: is_detected(client, picture()))
                assert is_serving(channel)
                load.wait_for_responses()
        assert {error.code() for error in load.failures} == {grpc.StatusCode.UNAVAILABLE}
        messages = {error.details() or "" for error in load.failures}
        assert any("the worker process that computed the batch ended" in m for m in messages)
        assert any("all workers of the model failed and are restarting" in m for m in messages)

        (pid,) = worker_pids(process.pid)  # idle now
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: worker_pids(process.pid) - {pid})
        wait_until(lambda: is_serving(channel))
        assert stub.Detect(pb.DetectRequest(image=picture()), timeout=60).detections
    text = log.read_text()
    assert text.count("ended: Killed") == 3
    assert text.count("ended: Segmentation fault") == 1
    assert text.count("longer than hang_timeout_s") == 1


async def test_all_requests_of_a_lost_batch_are_rejected(
    wide_bundle: Path, tmp_path: Path, picture: Encode
) -> None:
    """With the Open Inference Protocol, where several tasks get the error of a batch."""
    log = tmp_path / "log"
    options = "--max-delay-ms", "600000", "--max-batch", "8", "--metrics-port", "0"
    with server_process(wide_bundle, log, *options) as (process, address):
        metrics = metrics_from_log(log.read_text())
        async with connected(address, GRPCInferenceServiceStub) as stub:
            calls = [stub.ModelInfer(infer_request(MODEL, picture())) for _ in range(7)]
            name = "nv_inference_pending_request_count"
            await metrics.becomes(7, name, model=MODEL, version="1")
            (pid,) = worker_pids(process.pid)
            os.kill(pid, signal.SIGKILL)
            statuses = [await call.code() for call in calls]
    assert set(statuses) == {grpc.StatusCode.UNAVAILABLE}
    assert "Traceback" not in log.read_text()


def test_one_of_two_workers_continues_and_both_end_with_a_killed_server(
    wide_bundle: Path, tmp_path: Path, picture: Encode
) -> None:
    shared = set(os.listdir("/dev/shm"))
    with (
        server_process(wide_bundle, tmp_path / "log", "--workers", "2") as (process, address),
        grpc.insecure_channel(address) as channel,
    ):
        with Load(DetectorStub(channel), picture()) as load:
            load.wait_for_responses()
            killed, other = worker_pids(process.pid)
            os.kill(killed, signal.SIGKILL)
            while worker_pids(process.pid) == {other}:
                assert is_serving(channel)
            load.wait_for_responses()
        # Only the requests in the batch of the killed worker.
        assert len(load.failures) <= 3
        assert {error.code() for error in load.failures} <= {grpc.StatusCode.UNAVAILABLE}
        wait_until(lambda: len(worker_pids(process.pid)) == 2)
        workers = worker_pids(process.pid)
        process.kill()
        process.wait()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    # Tests in other processes also create files there temporarily.
    wait_until(lambda: set(os.listdir("/dev/shm")) <= shared)


@pytest.mark.slow
async def test_a_hanging_batch_does_not_block_shutdown(
    wide_bundle: Path, tmp_path: Path, picture: Encode
) -> None:
    options = "--hang-timeout-s", "3600", "--stop-grace-s", "0.1", "--metrics-port", "0"
    log = tmp_path / "log"
    with server_process(wide_bundle, log, *options) as (process, address):
        metrics = metrics_from_log(log.read_text())
        async with connected(address) as stub:
            (pid,) = worker_pids(process.pid)
            os.kill(pid, signal.SIGSTOP)
            call = stub.Detect(pb.DetectRequest(image=picture()))
            await metrics.becomes(1, "maskrcnn_requests_in_progress")
            process.send_signal(signal.SIGTERM)
            assert await call.code() is not grpc.StatusCode.OK
        assert process.wait(120) == 0


def test_a_server_can_be_stopped_while_loading(wide_bundle: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with starting_server(wide_bundle, log) as process:
        wait_until(lambda: worker_pids(process.pid))
        workers = worker_pids(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl+C in a terminal does
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert output == ""
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    assert "Traceback" not in log.read_text()
    assert "stopped before the server was ready" in log.read_text()


def test_an_unloadable_model_is_reported_in_one_line(wide_bundle: Path, tmp_path: Path) -> None:
    damaged = linked_copy(wide_bundle, tmp_path / "bundle")
    for model in damaged.glob("*.onnx"):
        model.unlink()
        model.write_bytes(b"damaged")
    log = tmp_path / "log"
    with starting_server(damaged, log, "--workers", "2") as process:
        assert process.wait(timeout=60) == 1
    assert re.search(r"\nError: .*\.onnx is not the file that was exported .*\n\Z", log.read_text())
    assert "Traceback" not in log.read_text()
