"""Metrics of a real server, scraped over HTTP and read with Prometheus' own parsers."""

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from gated_engine import Gate
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families as text_families
from scraped_metrics import Metrics, metrics_from_log, read
from triton_requests import MODEL, infer_request

from maskrcnn_trt.protos.inference import open_inference_pb2 as inference
from maskrcnn_trt.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.prometheus import endpoint
from maskrcnn_trt.serving.prometheus.collectors import GPU_METRICS
from maskrcnn_trt.serving.server import detection_server

Encode = Callable[..., bytes]

OWN = {"model": MODEL, "version": "1"}
FORMATS = {
    "text/plain": text_families,
    "application/openmetrics-text; version=1.0.0": openmetrics_families,
}


@pytest.fixture
def served(bundle: Path, caplog: pytest.LogCaptureFixture) -> Any:
    """Return a context that serves a bundle and yields the address and the metrics."""

    @contextlib.asynccontextmanager
    async def serve(
        path: Path = bundle, reload: asyncio.Event | None = None, **settings: Any
    ) -> AsyncIterator[tuple[str, Metrics]]:
        config = ServeConfig(port=0, metrics_port=0, drain_delay_s=0, **settings)
        caplog.set_level("INFO")
        async with detection_server(path, config, reload) as address:
            yield address, metrics_from_log(caplog.text)

    return serve


def detect_request(image: bytes, **fields: Any) -> pb.DetectRequest:
    return pb.DetectRequest(image=image, **fields)


def test_requests_of_both_protocols_are_counted(served: Any, picture: Encode) -> None:
    wide, tall = picture(), picture(size=(200, 120))
    settings = {"max_batch": 2, "max_delay_ms": 60_000, "queue_size": 3}

    async def run() -> None:
        async with (
            served(**settings) as (address, metrics),
            grpc.aio.insecure_channel(address) as channel,
        ):
            detector: Any = DetectorStub(channel)
            triton: Any = GRPCInferenceServiceStub(channel)

            # Batches of two, because only full batches start within a minute.
            await asyncio.gather(*(detector.Detect(detect_request(wide)) for _ in range(2)))
            await triton.ModelInfer(infer_request(MODEL, wide, wide))
            await triton.ModelInfer(infer_request(f"{MODEL}-fp32", tall, tall))
            for call, code in (
                (detector.Detect(detect_request(b"no image")), "INVALID_ARGUMENT"),
                (detector.Detect(detect_request(wide, precision="fp16")), "INVALID_ARGUMENT"),
                (triton.ModelInfer(infer_request("other", wide)), "NOT_FOUND"),
                (detector.Detect(detect_request(wide, timeout_us=100_000)), "DEADLINE_EXCEEDED"),
            ):
                assert (await call.code()).name == code
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
            assert (counts.success.count, counts.fail.count) == (3, 7)

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
        for reason, count in (("OTHER", 3), ("REJECTED", 2), ("CANCELED", 2), ("BACKEND", 0)):
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
        reasons = {"invalid": 2, "not_found": 1, "expired": 1, "queue_full": 1, "cancelled": 2}
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

    asyncio.run(run())


def test_pending_images_are_counted_by_model_name(served: Any, picture: Encode) -> None:
    chosen = infer_request(MODEL, picture())
    chosen.parameters["precision"].string_param = "fp32"

    async def run() -> None:
        async with (
            served(max_delay_ms=60_000) as (address, metrics),
            grpc.aio.insecure_channel(address) as channel,
        ):
            detector: Any = DetectorStub(channel)
            triton: Any = GRPCInferenceServiceStub(channel)
            waiting = [
                detector.Detect(detect_request(picture())),
                triton.ModelInfer(chosen),
                detector.Detect(detect_request(picture(), precision="fp32")),
                triton.ModelInfer(infer_request(f"{MODEL}-fp32", picture(), picture(1))),
            ]
            name, by_name = "nv_inference_pending_request_count", OWN | {"model": f"{MODEL}-fp32"}
            await metrics.becomes(2, name, **OWN)
            await metrics.becomes(3, name, **by_name)
            for call in waiting:
                call.cancel()
            await metrics.becomes(0, name, **OWN)
            await metrics.becomes(0, name, **by_name)

    asyncio.run(run())


def test_unauthenticated_calls_are_counted(served: Any, picture: Encode, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("secret")

    async def run() -> None:
        async with (
            served(token_file=tokens) as (address, metrics),
            grpc.aio.insecure_channel(address) as channel,
        ):
            detector: Any = DetectorStub(channel)
            call = detector.Detect(detect_request(picture()))
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
            assert await metrics.value("maskrcnn_rejected_total", reason="unauthenticated") == 1
            assert await metrics.value("nv_inference_request_success", **OWN) == 0

    asyncio.run(run())


def test_stream_messages_are_counted_as_requests(served: Any, picture: Encode) -> None:
    async def run() -> None:
        async with (
            served() as (address, metrics),
            grpc.aio.insecure_channel(address) as channel,
        ):
            detector: Any = DetectorStub(channel)
            images = (picture(), b"no image", picture())
            stream = detector.DetectStream(detect_request(image) for image in images)
            assert len([response async for response in stream]) == 3
            assert await metrics.value("nv_inference_request_success", **OWN) == 2
            assert await metrics.value("maskrcnn_rejected_total", reason="invalid") == 1

    asyncio.run(run())


def test_reloads_are_counted_by_result(served: Any, bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    shutil.copytree(bundle, path)

    async def run() -> None:
        reload = asyncio.Event()
        async with served(path, reload) as (_, metrics):
            reload.set()
            await metrics.becomes(1, "maskrcnn_reloads_total", result="success")
            (path / "manifest.json").unlink()
            reload.set()
            await metrics.becomes(1, "maskrcnn_reloads_total", result="failure")
            assert await metrics.value("maskrcnn_reloads_total", result="success") == 1

    asyncio.run(run())


def test_both_formats_have_the_same_metrics(served: Any) -> None:
    async def texts() -> list[str]:
        async with served() as (_, metrics):
            return [await asyncio.to_thread(read, metrics.url, f) for f in FORMATS]

    plain, other = (
        {s.name for family in parse(text) for s in family.samples if "_created" not in s.name}
        for parse, text in zip(FORMATS.values(), asyncio.run(texts()), strict=True)
    )
    assert plain == other
    assert {"nv_inference_count", "maskrcnn_rejected_total"} <= plain


def test_all_metrics_are_documented(served: Any) -> None:
    async def text() -> str:
        async with served() as (_, metrics):
            return await asyncio.to_thread(read, metrics.url)

    families = {
        family.name
        for family in text_families(asyncio.run(text()))
        if not re.match("process_|.*_created", family.name)
    }
    page = (Path(endpoint.__file__).parents[1] / "deploy" / "monitoring.md").read_text()
    documented = set()
    for name in re.findall(r"`((?:nv|maskrcnn)_[a-z_,{}]+)`", page):
        before, options, after = re.fullmatch(r"([^{]*){?([^}]*)}?(.*)", name).groups()
        documented |= {
            f"{before}{option}{after}".removesuffix("_total") for option in options.split(",")
        }
    assert documented == families | {*GPU_METRICS}


def test_backend_failures_are_counted(served: Any, picture: Encode, gate: Gate) -> None:
    async def run() -> None:
        async with (
            served() as (address, metrics),
            grpc.aio.insecure_channel(address) as channel,
        ):
            detector: Any = DetectorStub(channel)
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
            async with asyncio.timeout(60):
                while await metrics.value("maskrcnn_engine_restarts_total", **engines) < 1:
                    await asyncio.sleep(0.1)
            assert await metrics.value("maskrcnn_engines_up", **engines) == 1

    asyncio.run(run())
