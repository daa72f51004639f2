"""Trace spans of a real server, received by an OTLP collector."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from http_server import free_port
from in_process_server import connected, served
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
from maskrcnn_trt.serving.errors import ServingError
from maskrcnn_trt.serving.monitoring.telemetry import load_tracer

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


def trace(send: Callable[[Any], Any], wide_bundle: Path, **settings: Any) -> None:
    """Send requests to a tracing server. When this returns, all spans have been exported."""

    async def serve() -> None:
        async with (
            served(wide_bundle, tracing=True, stop_grace_s=30, **settings) as address,
            connected(address) as stub,
        ):
            await send(stub)

    asyncio.run(serve())


def test_spans_of_a_request_and_of_a_stream(
    wide_bundle: Path, collector: SpanCollector, picture: Encode
) -> None:
    async def send(stub: Any) -> None:
        metadata = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
        response = await stub.Detect(pb.DetectRequest(image=picture()), metadata=metadata)
        timings.append(response.timing)
        images = (picture(), b"no image", picture())
        stream = stub.DetectStream(pb.DetectRequest(image=image) for image in images)
        assert len([response async for response in stream]) == 3

    timings: list[Any] = []
    trace(send, wide_bundle)
    assert collector.service == "maskrcnn"
    call, stream = collector.calls()
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
    own = [span for span in collector.spans if span.trace_id != stream.trace_id]
    assert {span.trace_id.hex() for span in own} == {TRACE}

    assert attributes_of(stream)["rpc.grpc.status_code"] == 0
    of_messages = [[s.name for s in collector.children(d)] for d in collector.children(stream)]
    assert sorted(of_messages) == [[], STAGES, STAGES]


def test_failed_requests_have_spans(
    wide_bundle: Path, collector: SpanCollector, picture: Encode
) -> None:
    async def send(stub: Any) -> None:
        await stub.Detect(pb.DetectRequest(image=b"no image")).code()
        await stub.Detect(pb.DetectRequest(image=picture(), timeout_us=50_000)).code()
        await stub.Detect(pb.DetectRequest(image=picture()), timeout=0.5).code()

    trace(send, wide_bundle, max_batch=4, max_delay_ms=60_000)
    calls = collector.calls()
    codes = [attributes_of(call)["rpc.grpc.status_code"] for call in calls]
    assert codes == [3, 4, 1]
    # Client errors do not set the span's error status.
    assert [call.status.code == Status.STATUS_CODE_ERROR for call in calls] == [False, True, False]
    for call in calls:
        (detect,) = collector.children(call)
        assert not collector.children(detect)
    (rejected,) = collector.children(calls[0])
    assert rejected.status.code == Status.STATUS_CODE_UNSET
    (event,) = rejected.events
    assert any("not a JPEG" in own.value.string_value for own in event.attributes)


def test_environment_variables_configure_the_exporter(
    wide_bundle: Path, collector: SpanCollector, picture: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send(stub: Any) -> None:
        sampled = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
        await stub.Detect(pb.DetectRequest(image=picture()))
        await stub.Detect(pb.DetectRequest(image=picture()), metadata=sampled)

    monkeypatch.setenv("OTEL_SERVICE_NAME", "factory")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    trace(send, wide_bundle)
    assert collector.service == "factory"
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert len(collector.spans) == 6


def test_server_works_without_a_collector(
    wide_bundle: Path, picture: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send(stub: Any) -> None:
        assert (await stub.Detect(pb.DetectRequest(image=picture()))).detections

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    trace(send, wide_bundle)


@pytest.mark.parametrize("name", ["EXPORTER_OTLP_TIMEOUT", "EXPORTER_OTLP_COMPRESSION"])
def test_invalid_environment_variables_are_reported(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"OTEL_{name}", "10s")
    with pytest.raises(ServingError, match=r"10s.*OTEL"):
        load_tracer(tracing=True)


def test_missing_opentelemetry_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ServingError, match=r'opentelemetry.*pip install "maskrcnn-trt\[tracing\]"'):
        load_tracer(tracing=True)


def test_spans_of_http_requests(
    wide_bundle: Path, collector: SpanCollector, picture: Encode
) -> None:
    port = free_port()

    async def send(_: Any) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            for body in (picture(), b"no image"):
                await client.post("/v1/detect", content=body, headers=headers, timeout=60)

    trace(send, wide_bundle, http_port=port)
    good, bad = collector.calls()
    assert (good.trace_id.hex(), good.parent_span_id.hex()) == (TRACE, PARENT)
    assert good.name == "POST /v1/detect"
    attributes = attributes_of(good)
    assert attributes.pop("network.peer.address").startswith("ipv4:127.0.0.1")
    assert attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/detect",
        "http.response.status_code": 200,
    }
    assert [span.name for span in collector.children(good)] == ["detect"]
    assert attributes_of(bad)["http.response.status_code"] == 400
