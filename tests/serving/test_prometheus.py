"""Metrics of a real server, scraped over HTTP and read with Prometheus' own parsers."""

import asyncio
import os
import re
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from bundle_copies import linked_copy
from gated_engine import Gate
from http_server import free_port
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families as text_families
from scraped_metrics import Metrics, read
from triton_requests import MODEL, infer_request
from unloadable_server import serving

from maskrcnn_trt.protos.inference import open_inference_pb2 as inference
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.serving import prometheus
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.detections import Timing
from maskrcnn_trt.serving.monitoring.machine_metrics import GPU_METRICS
from maskrcnn_trt.serving.monitoring.telemetry import Telemetry
from maskrcnn_trt.serving.pipeline.pipeline import ModelRepository
from maskrcnn_trt.serving.pipeline.served_model import ModelSource

Encode = Callable[..., bytes]

OWN = {"model": MODEL, "version": "1"}
FORMATS = {
    "text/plain": text_families,
    "application/openmetrics-text; version=1.0.0": openmetrics_families,
}


@pytest.fixture
def served(bundle: Path, caplog: pytest.LogCaptureFixture) -> Any:
    """Return a function that serves the bundle within a context."""
    return partial(serving, bundle, caplog)


def test_start_looks_up_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", None)
    with prometheus.metrics_server(CollectorRegistry(), "0.0.0.0", 0) as url:
        assert httpx.get(url.replace("0.0.0.0", "127.0.0.1")).status_code == 200


def test_host_name_with_addresses_of_both_families(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = (socket.AF_INET6, ("::1", 0, 0, 0)), (socket.AF_INET, ("127.0.0.1", 0))
    resolved = [(family, socket.SOCK_STREAM, 6, "", address) for family, address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: resolved)
    with prometheus.metrics_server(CollectorRegistry(), "both.test", 0) as url:
        monkeypatch.undo()
        # The IPv4 address is used, as for HTTP.
        assert httpx.get(url.replace("both.test", "127.0.0.1")).status_code == 200


def test_metrics_of_a_model_that_is_not_loaded_yet(wide_bundle: Path) -> None:
    models = ModelRepository([ModelSource(wide_bundle)], ServeConfig(), Telemetry())
    registry = CollectorRegistry()
    registry.register(prometheus.ModelCollector(models))
    assert registry.get_sample_value("nv_inference_request_success", OWN) == 0
    assert registry.get_sample_value("maskrcnn_slots", {"model": MODEL}) == 256
    models.close()


@pytest.mark.parametrize("query", ["", "?name[]=maskrcnn_request_seconds_count"])
def test_all_images_are_in_the_histograms(query: str) -> None:
    telemetry = Telemetry()
    for _ in range(100):
        telemetry.metrics.count_image(MODEL, "fp16", Timing(), 0.5)
    with prometheus.metrics_server(telemetry.metrics.registry, "127.0.0.1", 0) as url:
        page = httpx.get(url + query).text
    labels = f'{{model="{MODEL}",precision="fp16"}}'
    assert f"maskrcnn_request_seconds_count{labels} 100.0\n" in page


def detect_request(image: bytes, **fields: Any) -> pb.DetectRequest:
    return pb.DetectRequest(image=image, **fields)


async def test_requests_of_both_protocols_are_counted(served: Any, picture: Encode) -> None:
    wide, tall = picture(), picture(size=(200, 120))
    settings = {"max_batch": 2, "max_delay_ms": 60_000, "queue_size": 2}

    async def check(metrics: Metrics) -> None:
        by_name = {"model": f"{MODEL}-fp32", "version": "1"}
        expected = {
            ("request_success", 3, 1),
            ("count", 4, 2),
            ("exec_count", 2, 1),
        }
        for name, own, other in expected:
            assert await metrics.value(f"nv_inference_{name}", **OWN) == own
            assert await metrics.value(f"nv_inference_{name}", **by_name) == other
        for reason, count in (("OTHER", 2), ("REJECTED", 2), ("CANCELED", 2), ("BACKEND", 0)):
            name = "nv_inference_request_failure"
            assert await metrics.value(name, **OWN, reason=reason) == count
            assert await metrics.value(name, **by_name, reason=reason) == 0
        assert await metrics.value("nv_inference_pending_request_count", **OWN) == 0
        parts = ("queue", "compute_input", "compute_infer", "compute_output")
        us = [await metrics.value(f"nv_inference_{part}_duration_us", **OWN) for part in parts]
        assert 0 < sum(us) <= await metrics.value("nv_inference_request_duration_us", **OWN)

        image = {"model": MODEL, "precision": "fp32"}
        for stage in ("decode", "queue", "infer", "encode", "request"):
            assert await metrics.value(f"maskrcnn_{stage}_seconds_count", **image) == 6
        total = await metrics.value("maskrcnn_request_seconds_sum", **image)
        assert 0 < await metrics.value("maskrcnn_infer_seconds_sum", **image) < total
        for size, images in (("1.0", 0), ("2.0", 6), ("+Inf", 6)):
            name = "maskrcnn_batch_size_bucket"
            assert await metrics.value(name, **image, le=size) == images
        reasons = {"invalid": 1, "not_found": 2, "expired": 1, "queue_full": 1, "cancelled": 2}
        for reason in ("failed", "backend_down", "stopping", "unauthenticated", *reasons):
            count = await metrics.value("maskrcnn_rejected_total", reason=reason)
            assert count == reasons.get(reason, 0)
        await metrics.value("maskrcnn_model_info", **image, backend="onnxruntime", device="cpu")
        assert await metrics.value("process_resident_memory_bytes") > 1e6
        assert 0 <= await metrics.value("nv_cpu_utilization") <= 1
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert await metrics.value("nv_cpu_memory_total_bytes") == memory
        assert 0 < await metrics.value("nv_cpu_memory_used_bytes") < memory
        assert await metrics.value("maskrcnn_event_loop_lag_seconds") >= 0
        assert await metrics.value("maskrcnn_event_loop_lag_worst_seconds") > 0

    async with served(**settings) as server:
        detector, triton, metrics = server.detector, server.inference, server.metrics
        # Batches of two, because only full batches start within a minute.
        await asyncio.gather(*(detector.Detect(detect_request(wide)) for _ in range(2)))
        await triton.ModelInfer(infer_request(MODEL, wide, wide))
        await triton.ModelInfer(infer_request(f"{MODEL}-fp32", tall, tall))
        # A slot is free only after the response has been sent.
        await metrics.becomes(0, "maskrcnn_slots_in_use", model=MODEL)
        # One after another, because more than two at once could be too many for the queue.
        for method, request, code in (
            (detector.Detect, detect_request(b"no image"), "INVALID_ARGUMENT"),
            (detector.Detect, detect_request(wide, precision="fp16"), "NOT_FOUND"),
            (triton.ModelInfer, infer_request("other", wide), "NOT_FOUND"),
            (detector.Detect, detect_request(wide, timeout_us=100_000), "DEADLINE_EXCEEDED"),
        ):
            assert (await method(request).code()).name == code
            await metrics.becomes(0, "maskrcnn_slots_in_use", model=MODEL)
        waiting = [detector.Detect(detect_request(image)) for image in (wide, tall)]
        await metrics.becomes(2, "nv_inference_pending_request_count", **OWN)
        assert await metrics.value("maskrcnn_requests_in_progress") == 2
        refused = detector.Detect(detect_request(wide))
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in waiting:
            call.cancel()
        await metrics.becomes(0, "maskrcnn_requests_in_progress")
        await check(metrics)
        stats = await triton.ModelStatistics(inference.ModelStatisticsRequest(name=MODEL))
        counts = stats.model_stats[0].inference_stats
        assert (counts.success.count, counts.fail.count) == (3, 6)


async def test_pending_images_are_counted_by_model_name(served: Any, picture: Encode) -> None:
    chosen = infer_request(MODEL, picture())
    chosen.parameters["precision"].string_param = "fp32"
    async with served(max_batch=8, max_delay_ms=60_000, max_wait_s=600) as server:
        detector, triton, metrics = server.detector, server.inference, server.metrics
        waiting = [
            detector.Detect(detect_request(picture())),
            triton.ModelInfer(chosen),
            detector.Detect(detect_request(picture(), precision="fp32")),
            triton.ModelInfer(infer_request(f"{MODEL}-fp32", picture(), picture(1))),
        ]
        name, by_name = "nv_inference_pending_request_count", OWN | {"model": f"{MODEL}-fp32"}
        await metrics.becomes(2, name, **OWN)
        await metrics.becomes(3, name, **by_name)
        # Two slots for the images of the last request.
        assert await metrics.value("maskrcnn_slots_in_use", model=MODEL) == 5
        assert await metrics.value("maskrcnn_slots", model=MODEL) == 256
        for call in waiting:
            call.cancel()
        await metrics.becomes(0, name, **OWN)
        await metrics.becomes(0, name, **by_name)
        await metrics.becomes(0, "maskrcnn_slots_in_use", model=MODEL)


async def test_a_fresh_server_estimates_its_rate_from_the_warm_up(
    served: Any, gate: Gate, picture: Encode
) -> None:
    gate.open()
    async with served(max_wait_s=0.001) as server:
        gate.close()
        call = server.detector.Detect(detect_request(picture()))
        await server.metrics.becomes(1, "maskrcnn_slots_in_use", model=MODEL)
        assert await server.metrics.value("maskrcnn_slots", model=MODEL) == 32
        assert await server.metrics.value("maskrcnn_estimated_wait_seconds", model=MODEL) > 0.001
        gate.open()
        assert (await call).detections


async def test_connections_are_counted_by_port(served: Any, picture: Encode) -> None:
    free = free_port()
    async with served(http_port=free) as server:
        metrics, http = server.metrics, {"port": str(free)}
        assert await metrics.value("maskrcnn_connections", **http) == 0
        readers = [await asyncio.open_connection("127.0.0.1", free) for _ in range(3)]
        await metrics.becomes(3, "maskrcnn_connections", **http)
        for _, writer in readers:
            writer.close()
        await metrics.becomes(0, "maskrcnn_connections", **http)
        assert (await server.detector.Detect(detect_request(picture()))).detections
        text = await asyncio.to_thread(read, metrics.url)
    counts = dict(re.findall(r'^maskrcnn_connections{port="(\d+)"} (\S+)', text, re.M))
    scraped = metrics.url.rpartition(":")[2].removesuffix("/metrics")
    (grpc_port,) = counts.keys() - {http["port"], scraped}
    # The channel of the Triton client is idle.
    assert float(counts[grpc_port]) >= 1


async def test_stream_messages_and_unauthenticated_calls_are_counted(
    served: Any, picture: Encode, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("secret")
    async with served(token_file=tokens) as server:
        detector, metrics = server.detector, server.metrics
        call = detector.Detect(detect_request(picture()))
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await metrics.value("maskrcnn_rejected_total", reason="unauthenticated") == 1
        assert await metrics.value("nv_inference_request_success", **OWN) == 0
        images = (picture(), b"no image", picture())
        metadata = (("authorization", "Bearer secret"),)
        stream = detector.DetectStream(map(detect_request, images), metadata=metadata)
        assert len([response async for response in stream]) == 3
        assert await metrics.value("nv_inference_request_success", **OWN) == 2
        assert await metrics.value("maskrcnn_rejected_total", reason="invalid") == 1


async def test_reloads_are_counted_by_result(
    wide_bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = linked_copy(wide_bundle, tmp_path / "bundle")
    reload = asyncio.Event()
    async with serving(path, caplog, reload) as server:
        metrics = server.metrics
        reload.set()
        await metrics.becomes(1, "maskrcnn_reloads_total", result="success")
        (path / "manifest.json").unlink()
        reload.set()
        await metrics.becomes(1, "maskrcnn_reloads_total", result="failure")
        assert await metrics.value("maskrcnn_reloads_total", result="success") == 1


async def test_both_formats_have_the_documented_metrics(served: Any) -> None:
    async with served() as server:
        texts = [await asyncio.to_thread(read, server.metrics.url, form) for form in FORMATS]
    parsed = zip(FORMATS.values(), texts, strict=True)
    plain, openmetrics = (list(parse(text)) for parse, text in parsed)
    samples, others = (
        {s.name for family in families for s in family.samples if "_created" not in s.name}
        for families in (plain, openmetrics)
    )
    assert samples == others
    assert {"nv_inference_count", "maskrcnn_rejected_total"} <= samples

    exported = {f.name for f in plain if not re.match("process_|.*_created", f.name)}
    page = (Path(prometheus.__file__).parent / "deploy" / "monitoring.md").read_text()
    documented = set()
    for name in re.findall(r"`((?:nv|maskrcnn)_[a-z_,{}]+)`", page):
        before, options, after = re.fullmatch(r"([^{]*){?([^}]*)}?(.*)", name).groups()
        documented |= {
            f"{before}{option}{after}".removesuffix("_total") for option in options.split(",")
        }
    # Not without a GPU, and not without TLS.
    assert documented == exported | {*GPU_METRICS, "maskrcnn_certificate_days_left"}


async def test_backend_failures_are_counted(served: Any, picture: Encode, gate: Gate) -> None:
    async with served() as server:
        detector, metrics = server.detector, server.metrics
        engines = {"model": MODEL, "precision": "fp32"}
        assert await metrics.value("maskrcnn_engines_up", **engines) == 1
        gate.break_with(RuntimeError("no memory"))
        for _ in range(3):
            call = detector.Detect(detect_request(picture()))
            assert await call.code() is grpc.StatusCode.INTERNAL
        assert await metrics.value("maskrcnn_engines_up", **engines) == 0
        call = detector.Detect(detect_request(picture()))
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert await metrics.value("maskrcnn_rejected_total", reason="failed") == 3
        assert await metrics.value("maskrcnn_rejected_total", reason="backend_down") == 1
        failures = {"name": "nv_inference_request_failure", "reason": "BACKEND", **OWN}
        assert await metrics.value(**failures) == 4
        assert await metrics.value("maskrcnn_engine_restarts_total", **engines) == 0
        gate.break_with(None)
        await metrics.becomes(1, "maskrcnn_engine_restarts_total", **engines)
        assert await metrics.value("maskrcnn_engines_up", **engines) == 1
