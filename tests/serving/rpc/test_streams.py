"""Back-pressure of streams: requests wait for slots instead of being rejected."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from gated_engine import Gate
from in_process_server import OWN_CONNECTION
from triton_requests import MODEL, infer_request

from maskrcnn_trt.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.server import detection_server

Encode = Callable[..., bytes]

REQUESTS = 12


@contextlib.asynccontextmanager
async def connections(
    bundle: Path, number: int, **settings: Any
) -> AsyncIterator[list[grpc.aio.Channel]]:
    """Open connections to a server with eight slots."""
    config = ServeConfig(port=0, queue_size=8, max_batch=4, drain_delay_s=0, **settings)
    async with (
        detection_server(bundle, config) as address,
        contextlib.AsyncExitStack() as channels,
    ):
        yield [
            await channels.enter_async_context(
                grpc.aio.insecure_channel(address, options=OWN_CONNECTION)
            )
            for _ in range(number)
        ]


def test_streams_of_several_connections_get_all_responses(bundle: Path, picture: Encode) -> None:
    requests = [pb.DetectRequest(id=str(n), image=picture(n)) for n in range(REQUESTS)]

    async def responses(channel: grpc.aio.Channel) -> list[pb.DetectStreamResponse]:
        stub: Any = DetectorStub(channel)
        return [response async for response in stub.DetectStream(iter(requests))]

    async def run() -> list[list[pb.DetectStreamResponse]]:
        async with connections(bundle, 4) as channels:
            return await asyncio.gather(*map(responses, channels))

    for received in asyncio.run(run()):
        assert sorted(int(response.id) for response in received) == list(range(REQUESTS))
        assert not [response.error for response in received if response.HasField("error")]


@pytest.mark.parametrize(("streams", "images"), [(1, 4), (3, 1), (3, 3)])
def test_streams_of_batches_get_all_responses(
    bundle: Path, picture: Encode, streams: int, images: int
) -> None:
    request = infer_request(MODEL, *(picture(n) for n in range(images)))

    async def responses(channel: grpc.aio.Channel) -> list[Any]:
        stub: Any = GRPCInferenceServiceStub(channel)
        return [response async for response in stub.ModelStreamInfer(iter([request] * REQUESTS))]

    async def run() -> list[list[Any]]:
        async with connections(bundle, streams) as channels:
            return await asyncio.gather(*map(responses, channels))

    for received in asyncio.run(run()):
        assert [response.error_message for response in received] == [""] * REQUESTS


def test_call_gets_a_slot_beside_a_waiting_stream(
    bundle: Path, gate: Gate, picture: Encode
) -> None:
    request = pb.DetectRequest(image=picture())

    async def run() -> None:
        async with connections(bundle, 2, max_delay_ms=0) as (streaming, calling):
            gate.close()
            stub: Any = DetectorStub(streaming)
            other: Any = DetectorStub(calling)
            stream = stub.DetectStream(iter([request] * REQUESTS))
            await gate.comes_to(gate.count + 1)
            call = other.Detect(request)
            await asyncio.sleep(0.1)  # it has a slot then, or is rejected
            gate.open()
            assert (await call).detections
            assert [response.HasField("error") async for response in stream] == [False] * REQUESTS

    asyncio.run(run())


def test_stop_drains_admitted_requests_and_ends_the_stream(
    bundle: Path, gate: Gate, picture: Encode
) -> None:
    request = pb.DetectRequest(image=picture())

    async def run() -> tuple[grpc.StatusCode, int]:
        config = ServeConfig(port=0, queue_size=8, max_batch=4, max_delay_ms=0, drain_delay_s=0)
        async with (
            contextlib.AsyncExitStack() as server,
            grpc.aio.insecure_channel(
                await server.enter_async_context(detection_server(bundle, config))
            ) as channel,
        ):
            gate.close()
            stub: Any = DetectorStub(channel)
            stream = stub.DetectStream(iter([request] * REQUESTS))
            await gate.comes_to(gate.count + 1)
            stopping = asyncio.create_task(server.aclose())
            await asyncio.sleep(0.2)
            gate.open()
            responded = 0
            with contextlib.suppress(grpc.RpcError):
                async for item in stream:
                    assert item.response.detections
                    responded += 1
            await stopping
            return await stream.code(), responded

    code, responded = asyncio.run(run())
    assert code is grpc.StatusCode.UNAVAILABLE
    assert 0 < responded < REQUESTS


@pytest.mark.parametrize("is_triton", [False, True])
def test_time_limit_includes_the_wait_for_a_slot(
    bundle: Path, gate: Gate, picture: Encode, is_triton: bool
) -> None:
    image = picture()
    inference = infer_request(MODEL, image)
    inference.parameters["timeout"].int64_param = 300_000

    async def error_on(channel: grpc.aio.Channel) -> str:
        if is_triton:
            triton: Any = GRPCInferenceServiceStub(channel)
            return str((await triton.ModelStreamInfer(iter([inference])).read()).error_message)
        detector: Any = DetectorStub(channel)
        request = pb.DetectRequest(image=image, timeout_us=300_000)
        return str((await detector.DetectStream(iter([request])).read()).error.message)

    async def run() -> None:
        async with connections(bundle, 9, max_delay_ms=0) as (*holding, waiting):
            gate.close()
            stubs: list[Any] = [DetectorStub(channel) for channel in holding]
            calls = [stub.Detect(pb.DetectRequest(image=image)) for stub in stubs]
            await asyncio.sleep(0.5)  # until they have all eight slots
            assert "0.3 s" in await error_on(waiting)
            gate.open()
            assert all([(await call).detections for call in calls])

    asyncio.run(run())
