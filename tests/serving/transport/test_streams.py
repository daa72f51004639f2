"""Streams that ask for more than there are places for: they wait, and are not refused."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from gated_engine import Gate
from inference_messages import infer_request
from triton_requests import MODEL

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
    """To a server that has eight places."""
    own = [("grpc.use_local_subchannel_pool", 1)]
    config = ServeConfig(port=0, queue_size=8, max_batch=4, drain_delay_s=0, **settings)
    async with (
        detection_server(bundle, config) as address,
        contextlib.AsyncExitStack() as channels,
    ):
        yield [
            await channels.enter_async_context(grpc.aio.insecure_channel(address, options=own))
            for _ in range(number)
        ]


def test_streams_of_several_connections_are_answered_whole(bundle: Path, picture: Encode) -> None:
    requests = [pb.DetectRequest(id=str(n), image=picture(n)) for n in range(REQUESTS)]

    async def answers(channel: grpc.aio.Channel) -> list[pb.DetectStreamResponse]:
        stub: Any = DetectorStub(channel)
        return [answer async for answer in stub.DetectStream(iter(requests))]

    async def ask() -> list[list[pb.DetectStreamResponse]]:
        async with connections(bundle, 4) as channels:
            return await asyncio.gather(*map(answers, channels))

    for answered in asyncio.run(ask()):
        assert sorted(int(answer.id) for answer in answered) == list(range(REQUESTS))
        assert not [answer.error for answer in answered if answer.HasField("error")]


@pytest.mark.parametrize(("streams", "images"), [(1, 4), (3, 1), (3, 3)])
def test_streams_of_batches_are_answered_whole(
    bundle: Path, picture: Encode, streams: int, images: int
) -> None:
    request = infer_request(MODEL, *(picture(n) for n in range(images)))

    async def answers(channel: grpc.aio.Channel) -> list[Any]:
        stub: Any = GRPCInferenceServiceStub(channel)
        return [answer async for answer in stub.ModelStreamInfer(iter([request] * REQUESTS))]

    async def ask() -> list[list[Any]]:
        async with connections(bundle, streams) as channels:
            return await asyncio.gather(*map(answers, channels))

    for answered in asyncio.run(ask()):
        assert [answer.error_message for answer in answered] == [""] * REQUESTS


def test_a_call_finds_a_place_beside_a_stream_that_waits(
    bundle: Path, gate: Gate, picture: Encode
) -> None:
    request = pb.DetectRequest(image=picture())

    async def ask() -> None:
        async with connections(bundle, 2, max_delay_ms=0) as (streaming, calling):
            gate.close()
            stub: Any = DetectorStub(streaming)
            other: Any = DetectorStub(calling)
            stream = stub.DetectStream(iter([request] * REQUESTS))
            await gate.comes_to(gate.count + 1)
            call = other.Detect(request)
            await asyncio.sleep(0.1)  # whose place is taken then, or refused
            gate.open()
            assert (await call).detections
            assert [answer.HasField("error") async for answer in stream] == [False] * REQUESTS

    asyncio.run(ask())


def test_a_stop_answers_what_has_a_place_and_ends_what_waits(
    bundle: Path, gate: Gate, picture: Encode
) -> None:
    request = pb.DetectRequest(image=picture())

    async def ask() -> tuple[grpc.StatusCode, int]:
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
            answered = 0
            with contextlib.suppress(grpc.RpcError):
                async for answer in stream:
                    assert answer.response.detections
                    answered += 1
            await stopping
            return await stream.code(), answered

    code, answered = asyncio.run(ask())
    assert code is grpc.StatusCode.UNAVAILABLE
    assert 0 < answered < REQUESTS


@pytest.mark.parametrize("is_triton", [False, True])
def test_time_that_a_request_may_take_counts_while_it_waits_for_a_place(
    bundle: Path, gate: Gate, picture: Encode, is_triton: bool
) -> None:
    image = picture()
    inference = infer_request(MODEL, image)
    inference.parameters["timeout"].int64_param = 300_000

    async def refusal_on(channel: grpc.aio.Channel) -> str:
        if is_triton:
            triton: Any = GRPCInferenceServiceStub(channel)
            return str((await triton.ModelStreamInfer(iter([inference])).read()).error_message)
        detector: Any = DetectorStub(channel)
        request = pb.DetectRequest(image=image, timeout_us=300_000)
        return str((await detector.DetectStream(iter([request])).read()).error.message)

    async def ask() -> None:
        async with connections(bundle, 9, max_delay_ms=0) as (*holding, waiting):
            gate.close()
            stubs: list[Any] = [DetectorStub(channel) for channel in holding]
            calls = [stub.Detect(pb.DetectRequest(image=image)) for stub in stubs]
            await asyncio.sleep(0.5)  # for them to have all eight places
            assert "took longer than its 0.3 s" in await refusal_on(waiting)
            gate.open()
            assert all([(await call).detections for call in calls])

    asyncio.run(ask())
