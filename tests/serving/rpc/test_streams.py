"""Back-pressure of streams: requests wait for slots instead of being rejected."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from gated_engine import Gate
from in_process_server import connected, served, served_in_thread
from scraped_metrics import metrics_from_log
from triton_requests import MODEL, infer_request

from maskrcnn_trt.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.pipeline.admission import AdmissionController
from maskrcnn_trt.serving.rpc.streams import Admission, Streams

Encode = Callable[..., bytes]

REQUESTS = 12


SETTINGS = {"queue_size": 8, "max_batch": 4}


@pytest.fixture(scope="module")
def address(wide_bundle: Path) -> Iterator[str]:
    """Address of a server with eight slots."""
    with served_in_thread(wide_bundle, max_delay_ms=2, **SETTINGS) as address:
        yield address


@contextlib.asynccontextmanager
async def connections(address: str, number: int) -> AsyncIterator[list[grpc.aio.Channel]]:
    async with contextlib.AsyncExitStack() as channels:
        yield [
            await channels.enter_async_context(connected(address, lambda channel: channel))
            for _ in range(number)
        ]


async def test_streams_of_several_connections_get_all_responses(
    address: str, picture: Encode
) -> None:
    requests = [pb.DetectRequest(id=str(n), image=picture(n)) for n in range(REQUESTS)]

    async def responses(channel: grpc.aio.Channel) -> list[pb.DetectStreamResponse]:
        stub: Any = DetectorStub(channel)
        return [response async for response in stub.DetectStream(iter(requests))]

    async with connections(address, 4) as channels:
        for received in await asyncio.gather(*map(responses, channels)):
            assert sorted(int(response.id) for response in received) == list(range(REQUESTS))
            assert not [response.error for response in received if response.HasField("error")]


@pytest.mark.parametrize(("streams", "images"), [(1, 4), (3, 1), (3, 3)])
async def test_streams_of_batches_get_all_responses(
    address: str, picture: Encode, streams: int, images: int
) -> None:
    request = infer_request(MODEL, *(picture(n) for n in range(images)))

    async def errors(channel: grpc.aio.Channel) -> list[str]:
        stub: Any = GRPCInferenceServiceStub(channel)
        responses = stub.ModelStreamInfer(iter([request] * REQUESTS))
        return [response.error_message async for response in responses]

    async with connections(address, streams) as channels:
        received = await asyncio.gather(*map(errors, channels))
    assert received == [[""] * REQUESTS] * streams


async def test_requests_beside_a_full_queue(
    wide_bundle: Path, gate: Gate, picture: Encode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    image = picture()
    request = pb.DetectRequest(image=image)

    async def get_slot_beside_a_stream(address: str) -> None:
        async with connections(address, 2) as (streaming, calling):
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

    async def expire_while_waiting(address: str) -> None:
        async with connections(address, 9) as (*holding, waiting):
            gate.close()
            stubs: list[Any] = [DetectorStub(channel) for channel in holding]
            calls = [stub.Detect(request) for stub in stubs]
            await metrics_from_log(caplog.text).becomes(8, "maskrcnn_requests_in_progress")
            limited = pb.DetectRequest(image=image, timeout_us=300_000)
            detector: Any = DetectorStub(waiting)
            response = await detector.DetectStream(iter([limited])).read()
            assert "0.3 s" in response.error.message
            inference = infer_request(MODEL, image)
            inference.parameters["timeout"].int64_param = 300_000
            triton: Any = GRPCInferenceServiceStub(waiting)
            response = await triton.ModelStreamInfer(iter([inference])).read()
            assert "0.3 s" in response.error_message
            gate.open()
            assert all([(await call).detections for call in calls])

    async with served(wide_bundle, metrics_port=0, **SETTINGS) as address:
        await get_slot_beside_a_stream(address)
        await expire_while_waiting(address)


async def test_stop_drains_admitted_requests_and_ends_the_stream(
    wide_bundle: Path, gate: Gate, picture: Encode
) -> None:
    request = pb.DetectRequest(image=picture())
    async with contextlib.AsyncExitStack() as server:
        running = served(wide_bundle, stop_grace_s=30, **SETTINGS)
        async with connected(await server.enter_async_context(running)) as stub:
            gate.close()
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
            assert await stream.code() is grpc.StatusCode.UNAVAILABLE
            assert 0 < responded < REQUESTS


async def test_no_response_follows_a_failed_one_in_an_ordered_stream() -> None:
    pipeline: Any = SimpleNamespace(admission=AdmissionController(8), stream_window=8)
    written: list[int] = []

    async def write(response: int) -> None:
        written.append(response)
        await asyncio.sleep(0)
        if response == 1:
            raise ValueError("the message is too large to serialise")

    async def requests() -> AsyncIterator[int]:
        for number in range(4):
            yield number

    async def respond(request: int, admission: Admission) -> int:
        async with admission:
            return request

    context: Any = SimpleNamespace(write=write, peer=lambda: "")
    streams = Streams[int](lambda _: pipeline, lambda _: 1)
    with pytest.raises(ExceptionGroup) as caught:
        await streams.process(requests(), respond, context, in_order=True)
    assert caught.group_contains(ValueError, match="too large")
    assert written == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("front_ends", [0, 1])
async def test_cancelled_streams_do_not_stay_open(
    wide_bundle: Path, picture: Encode, front_ends: int
) -> None:
    """An image can fail while its stream is cancelled."""
    request, queue_size = infer_request(MODEL, b"no image", picture()), 2
    end = time.monotonic() + 4

    async def cancel_streams(address: str) -> None:
        pauses = random.Random(0)
        async with connected(address, GRPCInferenceServiceStub) as stub:
            while time.monotonic() < end:
                call = stub.ModelStreamInfer()
                with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                    for _ in range(8):
                        await call.write(request)
                    await asyncio.sleep(pauses.random() * 0.03)
                call.cancel()

    with served_in_thread(wide_bundle, front_ends=front_ends, queue_size=queue_size) as address:
        await asyncio.gather(*(cancel_streams(address) for _ in range(4)))
        await asyncio.sleep(1)
        async with contextlib.AsyncExitStack() as open_streams:
            # The server accepts 8 open calls per admission slot.
            for _ in range(8 * queue_size):
                stub = await open_streams.enter_async_context(connected(address))
                call = stub.DetectStream(timeout=60)
                await call.write(pb.DetectRequest(image=picture()))
                assert (await call.read()).HasField("response")
