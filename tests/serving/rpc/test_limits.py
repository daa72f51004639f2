"""Limits on calls and their messages."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import raw_http2 as http2
from gated_engine import Gate
from in_process_server import (
    connected,
    gets_detections,
    served,
    served_in_thread,
    status_of,
)
from server_load import wait_until
from triton_requests import MODEL, infer_request

from maskrcnn_trt.protos.inference import open_inference_pb2 as triton_pb
from maskrcnn_trt.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub

Encode = Callable[..., bytes]
GET_MODEL = "/maskrcnn.v1.Detector/GetModel"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
GARBAGE = b"\xff\xff\xff\xff"
BAD, LATE, BUSY = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


@pytest.fixture(scope="module")
def address(wide_bundle: Path) -> Iterator[str]:
    """Address of a server with eight slots and messages of at most 1 MiB."""
    with served_in_thread(wide_bundle, queue_size=8, max_message_mb=1) as address:
        yield address


async def test_messages_that_cannot_be_parsed_are_rejected_without_a_log(
    address: str, caplog: pytest.LogCaptureFixture, picture: Encode
) -> None:
    caplog.set_level(logging.WARNING, "grpc")
    async with grpc.aio.insecure_channel(address) as channel:
        unary = channel.unary_unary(http2.DETECT)
        for _ in range(20):
            # The server waits for at most 16 messages at a time.
            for call in [unary(GARBAGE) for _ in range(4)]:
                status, message = await status_of(call)
                assert status is BAD
                assert "another .proto" in message
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(GARBAGE)
        assert (await status_of(watch))[0] is BAD
        for method in (http2.DETECT_STREAM, REFLECTION):
            stream = channel.stream_stream(method)
            good = pb.DetectRequest(id="1", image=picture()).SerializeToString()
            call = stream(iter([good, GARBAGE] if method == http2.DETECT_STREAM else [GARBAGE]))
            with contextlib.suppress(grpc.RpcError):
                responses = [pb.DetectStreamResponse.FromString(r) async for r in call]
                assert [response.id for response in responses] == ["1"]
            assert (await status_of(call))[0] is BAD
        assert await gets_detections(address, picture())
    assert not [record for record in caplog.records if "prometheus" not in record.name]


def test_call_without_a_message_is_rejected(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        assert channel.stream_unary(http2.DETECT).future(iter([])).code() is BAD
        assert list(channel.stream_stream(http2.DETECT_STREAM)(iter([]))) == []


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_message_size_is_limited_after_decompression(
    address: str,
    picture: Encode,
    compression: grpc.Compression | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "maskrcnn_trt.serving")
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(address, options, compression) as channel:
        stub: Any = DetectorStub(channel)

        def is_rejected_and_logged() -> bool:
            call = stub.Detect.future(pb.DetectRequest(image=bytes(20 << 20)))
            assert call.code() is BUSY
            assert "larger than max" in call.details()
            return "Detect from ipv4:127.0.0.1:" in caplog.text

        # gRPC can end such a call before the server has begun to handle it. Nothing is logged then.
        wait_until(is_rejected_and_logged)
        assert stub.Detect(pb.DetectRequest(image=picture())).detections


async def test_time_for_a_request_to_arrive_is_limited(wide_bundle: Path, picture: Encode) -> None:
    async with (
        served(wide_bundle, receive_timeout_s=0.3) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        never = asyncio.Event()

        async def nothing() -> AsyncIterator[bytes]:
            await never.wait()
            yield b""

        call = channel.stream_unary(http2.DETECT)(nothing())
        status, message = await status_of(call)
        assert status is LATE
        assert "within 0.3 s" in message
        stream: Any = DetectorStub(channel).DetectStream()
        await asyncio.sleep(0.5)  # streams have no such limit
        await stream.write(pb.DetectRequest(id="late", image=picture()))
        assert (await stream.read()).id == "late"
        stream.cancel()


@pytest.mark.parametrize("method", [http2.DETECT, http2.DETECT_STREAM])
def test_incomplete_messages_do_not_block_other_clients(
    address: str, picture: Encode, method: str
) -> None:
    with contextlib.ExitStack() as open_connections:
        for _ in range(20):
            connection = open_connections.enter_context(http2.connect(address))
            for stream in range(1, 9, 2):
                connection.sendall(http2.call(stream, method) + http2.incomplete_message(stream))
        for _ in range(2):
            assert asyncio.run(gets_detections(address, picture()))


async def test_oldest_waiting_stream_is_ended(wide_bundle: Path, picture: Encode) -> None:
    async with served(wide_bundle, queue_size=2) as address, connected(address) as stub:
        streams = []
        for index in range(3):  # one more than the limit
            streams.append(stub.DetectStream())
            await streams[-1].write(pb.DetectRequest(id=str(index), image=picture()))
            assert (await streams[-1].read()).response.detections
        status, message = await status_of(streams[0])
        assert status is BUSY
        assert "queue_size" in message
        await streams[2].write(pb.DetectRequest(id="again", image=picture()))
        assert (await streams[2].read()).id == "again"
        for stream in streams:
            stream.cancel()


async def test_stream_is_not_read_while_it_has_no_slot(
    wide_bundle: Path, gate: Gate, picture: Encode
) -> None:
    # If the server awaited a message of the full stream, other streams could displace it.
    image = picture()

    async def check(address: str, is_triton: bool) -> None:
        kind = GRPCInferenceServiceStub if is_triton else DetectorStub
        method = "ModelStreamInfer" if is_triton else "DetectStream"
        async with connected(address, kind) as own, connected(address, kind) as others:
            full = getattr(own, method)()
            gate.close()
            for _ in range(2):  # one in the model and the next one
                await full.write(request_of(image, is_triton))
            for _ in range(4):  # the limit on awaited messages
                stream = getattr(others, method)()
                await stream.write(request_of(b"no image", is_triton))
                assert "not a JPEG" in str(await stream.read())
            gate.open()
            assert all([await full.read() is not grpc.aio.EOF for _ in range(2)])
            await full.write(request_of(image, is_triton))
            await full.done_writing()
            assert "not a JPEG" not in str(await full.read())
            assert await full.code() is grpc.StatusCode.OK

    async with served(wide_bundle, queue_size=4, max_batch=1) as address:
        for is_triton in (False, True):
            await check(address, is_triton)


def request_of(image: bytes, is_triton: bool) -> pb.DetectRequest | triton_pb.ModelInferRequest:
    return infer_request(MODEL, image) if is_triton else pb.DetectRequest(image=image)


async def test_calls_release_their_slots_however_they_end(
    wide_bundle: Path, picture: Encode
) -> None:
    request = pb.DetectRequest(image=picture())
    async with (
        served(wide_bundle, queue_size=1) as address,  # at most eight open calls
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub: Any = DetectorStub(channel)
        for _ in range(20):
            await stub.GetModel(pb.GetModelRequest())
            assert (await status_of(channel.unary_unary(http2.DETECT)(GARBAGE)))[0] is BAD
            assert [response async for response in stub.DetectStream(iter([request]))]
            stub.Detect(request).cancel()
        with http2.connect(address, http2.NO_WINDOW) as connection:
            for stream in range(1, 41, 2):  # their responses are not read
                model = http2.call(stream, GET_MODEL)
                connection.sendall(model + http2.message(stream, pb.GetModelRequest()))
            # The last calls are rejected; before that the server may wait for their messages.
            await asyncio.to_thread(http2.frames_until, connection, http2.RST_STREAM, 4)
            assert await gets_detections(address, picture())
        assert await gets_detections(address, picture())
