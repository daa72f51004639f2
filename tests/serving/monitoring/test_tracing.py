"""Trace spans of a real server, received by an OTLP collector."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.server import detection_server

Encode = Callable[..., bytes]

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STAGES = ["decode", "queue", "infer", "encode"]


class SpanCollector(TraceServiceServicer):
    """OTLP collector that keeps all spans."""

    def __init__(self) -> None:
        self.service = ""
        self.spans: list[Span] = []

    def Export(  # noqa: N802
        self, request: ExportTraceServiceRequest, context: Any
    ) -> ExportTraceServiceResponse:
        for resource in request.resource_spans:
            attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
            self.service = attributes["service.name"]
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return ExportTraceServiceResponse()

    def children(self, parent: Span) -> list[Span]:
        """Return the child spans by start time."""
        own = [span for span in self.spans if span.parent_span_id == parent.span_id]
        return sorted(own, key=lambda span: span.start_time_unix_nano)

    def calls(self) -> list[Span]:
        """Return the spans of gRPC calls by start time."""
        own = [span for span in self.spans if span.kind == Span.SPAN_KIND_SERVER]
        return sorted(own, key=lambda span: span.start_time_unix_nano)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[SpanCollector]:
    collector = SpanCollector()
    server = grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    yield collector
    server.stop(None).wait()


def attributes_of(span: Span) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def trace(send: Callable[[Any], Any], bundle: Path, **settings: Any) -> None:
    """Send requests to a tracing server. When this returns, all spans have been exported."""

    async def serve() -> None:
        config = ServeConfig(port=0, drain_delay_s=0, tracing=True, **settings)
        async with (
            detection_server(bundle, config) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            await send(DetectorStub(channel))

    asyncio.run(serve())


def test_request_span_continues_the_trace_of_the_client(
    bundle: Path, collector: SpanCollector, picture: Encode
) -> None:
    async def send(stub: Any) -> None:
        metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
        response = await stub.Detect(pb.DetectRequest(image=picture()), metadata=metadata)
        timings.append(response.timing)

    timings: list[Any] = []
    trace(send, bundle)
    assert collector.service == "maskrcnn"
    (call,) = collector.calls()
    assert (call.trace_id.hex(), call.parent_span_id.hex()) == (TRACE, PARENT)
    assert call.name == "maskrcnn.v1.Detector/Detect"
    attributes = attributes_of(call)
    assert attributes.pop("network.peer.address").startswith("ipv4:127.0.0.1")
    assert attributes == {
        "rpc.system": "grpc",
        "rpc.service": "maskrcnn.v1.Detector",
        "rpc.method": "Detect",
        "rpc.grpc.status_code": 0,
    }
    (detect,) = collector.children(call)
    assert detect.name == "detect"
    stages = collector.children(detect)
    assert [stage.name for stage in stages] == STAGES
    for stage in stages:
        us = getattr(timings[0], f"{stage.name}_us")
        assert stage.end_time_unix_nano - stage.start_time_unix_nano == 1000 * us
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}


def test_failed_requests_have_spans(
    bundle: Path, collector: SpanCollector, picture: Encode
) -> None:
    async def send(stub: Any) -> None:
        await stub.Detect(pb.DetectRequest(image=b"no image")).code()
        await stub.Detect(pb.DetectRequest(image=picture(), timeout_us=50_000)).code()
        await stub.Detect(pb.DetectRequest(image=picture()), timeout=0.5).code()

    trace(send, bundle, max_batch=4, max_delay_ms=60_000)
    calls = collector.calls()
    codes = [attributes_of(call)["rpc.grpc.status_code"] for call in calls]
    assert codes == [3, 4, 1]
    # Client errors do not set the span's error status.
    assert [call.status.code == Status.STATUS_CODE_ERROR for call in calls] == [False, True, False]
    for call in calls:
        (detect,) = collector.children(call)
        assert not collector.children(detect)
    (rejected,) = collector.children(calls[0])
    assert rejected.status.code == Status.STATUS_CODE_ERROR
    assert "not a JPEG" in rejected.status.message


def test_each_message_of_a_stream_has_a_span(
    bundle: Path, collector: SpanCollector, picture: Encode
) -> None:
    async def send(stub: Any) -> None:
        images = (picture(), b"no image", picture())
        stream = stub.DetectStream(pb.DetectRequest(image=image) for image in images)
        assert len([response async for response in stream]) == 3

    trace(send, bundle)
    (call,) = collector.calls()
    assert attributes_of(call)["rpc.grpc.status_code"] == 0
    stages = [[s.name for s in collector.children(d)] for d in collector.children(call)]
    assert sorted(stages) == [[], STAGES, STAGES]


def test_environment_variables_configure_the_exporter(
    bundle: Path, collector: SpanCollector, picture: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send(stub: Any) -> None:
        sampled = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
        await stub.Detect(pb.DetectRequest(image=picture()))
        await stub.Detect(pb.DetectRequest(image=picture()), metadata=sampled)

    monkeypatch.setenv("OTEL_SERVICE_NAME", "factory")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    trace(send, bundle)
    assert collector.service == "factory"
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert len(collector.spans) == 6


def test_server_works_without_a_collector(
    bundle: Path, picture: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send(stub: Any) -> None:
        assert (await stub.Detect(pb.DetectRequest(image=picture()))).detections

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    trace(send, bundle)


def test_missing_opentelemetry_names_the_extra(bundle: Path) -> None:
    program = """
import sys
sys.modules["opentelemetry"] = None
from maskrcnn_trt.cli import main
main()
"""
    command = [sys.executable, "-c", program, "serve", str(bundle), "--tracing", "true"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "opentelemetry" in result.stderr
    assert "Traceback" not in result.stderr
    assert 'pip install "maskrcnn-trt[tracing]"' in result.stderr
