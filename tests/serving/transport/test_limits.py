"""What calls and their messages may do, each limit by its effect."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import raw_http2 as http2
from gated_engine import Gate
from inference_messages import infer_request
from limited_server import answers_rightly, served, status_of
from triton_requests import MODEL

from maskrcnn_trt.protos.inference import open_inference_pb2 as triton_pb
from maskrcnn_trt.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub

Encode = Callable[..., bytes]
GET_MODEL = "/maskrcnn.v1.Detector/GetModel"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
GARBAGE = b"\xff\xff\xff\xff"
BAD, LATE, BUSY = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


def test_message_that_does_not_parse_is_the_clients_fault(
    bundle: Path, caplog: pytest.LogCaptureFixture, picture: Encode
) -> None:
    async def ask() -> None:
        async with (
            served(bundle) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            unary = channel.unary_unary(http2.DETECT)
            for _ in range(5):
                for call in [unary(GARBAGE) for _ in range(200)]:
                    status, message = await status_of(call)
                    assert (status, message[:28]) == (BAD, "the message is no request of")
            watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(GARBAGE)
            assert (await status_of(watch))[0] is BAD
            for method in (http2.DETECT_STREAM, REFLECTION):
                stream = channel.stream_stream(method)
                good = pb.DetectRequest(id="1", image=picture()).SerializeToString()
                call = stream(
                    iter([good, GARBAGE, good] if method == http2.DETECT_STREAM else [GARBAGE])
                )
                with contextlib.suppress(grpc.RpcError):
                    answers = [pb.DetectStreamResponse.FromString(a) async for a in call]
                    assert [answer.id for answer in answers] == ["1"]
                assert (await status_of(call))[0] is BAD
            assert await answers_rightly(address, picture())

    caplog.set_level(logging.WARNING, "grpc")
    asyncio.run(ask())
    assert not [record for record in caplog.records if "loop_lag" not in record.name]


def test_call_without_a_message(bundle: Path) -> None:
    async def ask() -> None:
        async with served(bundle) as address, grpc.aio.insecure_channel(address) as channel:
            call = channel.stream_unary(http2.DETECT)(iter([]))
            assert await status_of(call) == (BAD, "the call ended before its request")
            answers = channel.stream_stream(http2.DETECT_STREAM)(iter([]))
            assert [answer async for answer in answers] == []

    asyncio.run(ask())


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_message_too_large_is_refused_though_it_be_compressed(
    bundle: Path, picture: Encode, compression: grpc.Compression | None
) -> None:
    async def ask() -> None:
        async with served(bundle, max_message_mb=1) as address:
            options = [("grpc.max_send_message_length", -1)]
            async with grpc.aio.insecure_channel(
                address, options=options, compression=compression
            ) as channel:
                stub: Any = DetectorStub(channel)
                status, message = await status_of(
                    stub.Detect(pb.DetectRequest(image=bytes(100 << 20)))
                )
                assert status is BUSY
                assert "larger than max" in message
                assert (await stub.Detect(pb.DetectRequest(image=picture()))).detections

    asyncio.run(ask())


def test_request_that_does_not_arrive_is_not_waited_for(bundle: Path, picture: Encode) -> None:
    async def ask() -> None:
        async with (
            served(bundle, receive_timeout_s=0.3) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            never = asyncio.Event()

            async def nothing() -> AsyncIterator[bytes]:
                await never.wait()
                yield b""

            call = channel.stream_unary(http2.DETECT)(nothing())
            status, message = await status_of(call)
            assert (status, message) == (LATE, "the message did not arrive within 0.3 s")
            stream: Any = DetectorStub(channel).DetectStream()
            await asyncio.sleep(0.5)  # streams may be silent
            await stream.write(pb.DetectRequest(id="late", image=picture()))
            assert (await stream.read()).id == "late"
            stream.cancel()

    asyncio.run(ask())


@pytest.mark.parametrize("method", [http2.DETECT, http2.DETECT_STREAM])
def test_messages_that_stop_half_way_keep_nobody_out(
    bundle: Path, picture: Encode, method: str
) -> None:
    async def ask() -> None:
        async with served(bundle, queue_size=8) as address:
            with contextlib.ExitStack() as open_connections:
                for _ in range(20):
                    connection = open_connections.enter_context(http2.connect(address))
                    for stream in range(1, 9, 2):
                        half = http2.call(stream, method) + http2.message_that_stops(stream)
                        await asyncio.to_thread(connection.sendall, half)
                assert await answers_rightly(address, picture())
                assert await answers_rightly(address, picture())

    asyncio.run(ask())


def test_stream_that_waits_longest_gives_way(bundle: Path, picture: Encode) -> None:
    async def ask() -> None:
        async with (
            served(bundle, queue_size=2) as address,
            grpc.aio.insecure_channel(address) as channel,
        ):
            stub: Any = DetectorStub(channel)
            streams = []
            for index in range(3):  # one more than are waited for
                streams.append(stub.DetectStream())
                await streams[-1].write(pb.DetectRequest(id=str(index), image=picture()))
                assert (await streams[-1].read()).response.detections
            status, message = await status_of(streams[0])
            assert status is BUSY
            assert "of this connection for this one longest" in message
            await streams[2].write(pb.DetectRequest(id="again", image=picture()))
            assert (await streams[2].read()).id == "again"
            for stream in streams:
                stream.cancel()

    asyncio.run(ask())


@pytest.mark.parametrize("is_triton", [False, True])
def test_stream_is_read_no_further_than_it_has_places(
    bundle: Path, gate: Gate, picture: Encode, is_triton: bool
) -> None:
    """A message that it did not await could be given up for those that others are to send."""
    image = picture()

    async def ask() -> None:
        async with (
            served(bundle, queue_size=4, max_batch=1) as address,
            grpc.aio.insecure_channel(address, OWN_CONNECTION) as own,
            grpc.aio.insecure_channel(address, OWN_CONNECTION) as others,
        ):
            full = stream_of(own, is_triton)
            gate.close()
            for _ in range(2):  # the one at the model and the next
                await full.write(request_of(image, is_triton))
            for _ in range(4):  # which is as many as are waited for
                stream = stream_of(others, is_triton)
                await stream.write(request_of(b"no image", is_triton))
                assert "no JPEG" in str(await stream.read())
            gate.open()
            assert all([await full.read() is not grpc.aio.EOF for _ in range(2)])
            await full.write(request_of(image, is_triton))
            await full.done_writing()
            assert "no JPEG" not in str(await full.read())
            assert await full.code() is grpc.StatusCode.OK

    asyncio.run(ask())


def stream_of(channel: grpc.aio.Channel, is_triton: bool) -> Any:
    if is_triton:
        triton: Any = GRPCInferenceServiceStub(channel)
        return triton.ModelStreamInfer()
    stub: Any = DetectorStub(channel)
    return stub.DetectStream()


def request_of(image: bytes, is_triton: bool) -> pb.DetectRequest | triton_pb.ModelInferRequest:
    return infer_request(MODEL, image) if is_triton else pb.DetectRequest(image=image)


def test_calls_give_their_places_back_however_they_end(bundle: Path, picture: Encode) -> None:
    request = pb.DetectRequest(image=picture())

    async def ask() -> None:
        async with (
            served(bundle, queue_size=1) as address,  # and 16 calls in all
            grpc.aio.insecure_channel(address) as channel,
        ):
            stub: Any = DetectorStub(channel)
            for _ in range(20):
                await stub.GetModel(pb.GetModelRequest())
                assert (await status_of(channel.unary_unary(http2.DETECT)(GARBAGE)))[0] is BAD
                assert [answer async for answer in stub.DetectStream(iter([request]))]
                stub.Detect(request).cancel()
            with http2.connect(address, http2.NO_WINDOW) as connection:
                for stream in range(1, 41, 2):  # whose answers are not taken
                    model = http2.call(stream, GET_MODEL)
                    connection.sendall(model + http2.message(stream, pb.GetModelRequest()))
                # Of 20 the last are refused. The server may have to wait for messages till then.
                await asyncio.to_thread(http2.frames_until, connection, http2.RST_STREAM, 4)
                assert await answers_rightly(address, picture())
            assert await answers_rightly(address, picture())

    asyncio.run(ask())
