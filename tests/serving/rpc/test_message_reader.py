"""Waits for messages, and validation of serialised messages, compared with protobuf's parser."""

import asyncio
import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from request_strategies import messages
from server_load import peak_memory_of, server_process
from triton_requests import MODEL, infer_request

from maskrcnn_trt.protos.inference.open_inference_pb2 import ModelInferRequest
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2 import DetectRequest
from maskrcnn_trt.serving.errors import ExpiredError, InvalidRequestError
from maskrcnn_trt.serving.rpc.message_reader import PendingMessages, check_message

MIB = 1 << 20
KIND = ModelInferRequest.DESCRIPTOR
# Tags of length-delimited fields.
RAW_CONTENTS, INPUT, OUTPUT, PARAMETER = b"\x3a", b"\x2a", b"\x32", b"\x22"
SHAPE, CONTENTS = b"\x1a", b"\x2a"  # fields of an input
UINTS, FLOATS, STRINGS = b"\x22", b"\x32", b"\x42"  # fields of typed contents


def sized(tag: bytes, contents: bytes) -> bytes:
    length, size = b"", len(contents)
    while size > 127:
        length += bytes([size & 127 | 128])
        size >>= 7
    return tag + length + bytes([size]) + contents


def typed(tag: bytes, contents: bytes) -> bytes:
    return sized(INPUT, sized(CONTENTS, sized(tag, contents)))


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_valid_messages_pass_and_rejected_ones_are_malformed_for_protobuf(
    data: st.DataObject,
) -> None:
    valid = data.draw(messages(KIND, {})).SerializeToString()
    check_message(valid, KIND)
    written = bytearray(valid)
    for _ in range(data.draw(st.integers(0, 3)) if written else 0):
        written[data.draw(st.integers(0, len(written) - 1))] = data.draw(st.integers(0, 255))
    message = bytes(written[: data.draw(st.integers(0, len(written)))])
    try:
        check_message(message, KIND)
    except DecodeError as error:
        if "wire type" not in str(error):  # groups: protobuf skips them
            with pytest.raises(DecodeError):
                ModelInferRequest.FromString(message)


@pytest.mark.parametrize(
    "message",
    [
        sized(RAW_CONTENTS, bytes(9 * MIB)),
        typed(FLOATS, bytes(9 * MIB)),
        typed(STRINGS, bytes(9 * MIB)),
        typed(UINTS, bytes(8 * MIB)),
        sized(b"\x7a", bytes(9 * MIB)),  # unknown field
    ],
    ids=["raw", "floats", "strings", "maximum size of numbers", "unknown"],
)
def test_large_contents_that_are_copied_pass(message: bytes) -> None:
    check_message(message, KIND)
    assert ModelInferRequest.FromString(message).ByteSize() == len(message)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (typed(UINTS, bytes(8 * MIB + 1)), r" 8 MiB .* inputs\.contents\.uint_contents"),
        (sized(INPUT, sized(SHAPE, bytes(9 * MIB))), r"inputs\.shape"),
        (3 * typed(UINTS, bytes(3 * MIB)), "uint_contents"),
        (sized(b"\x1a", b"x" * (9 * MIB)), "field id[)]"),
        (4097 * sized(INPUT, b""), "more than 4096 fields"),
        (4097 * sized(OUTPUT, b""), "more than 4096 fields"),
        (4097 * sized(PARAMETER, b""), "more than 4096 fields"),
        (4097 * sized(RAW_CONTENTS, b""), "more than 4096 fields"),
        (4097 * b"\x78\x00", "more than 4096 fields"),
        (typed(STRINGS, b"") + sized(INPUT, sized(CONTENTS, 4096 * b"\x42\x00")), "4096 fields"),
        (sized(INPUT, 4096 * b"\x18\x01"), "more than 4096 fields"),  # one number per field
    ],
)
def test_fields_and_packed_values_are_limited(message: bytes, words: str) -> None:
    ModelInferRequest.FromString(message)
    with pytest.raises(InvalidRequestError, match=words):
        check_message(message, KIND)


@pytest.mark.parametrize(
    "message",
    [
        RAW_CONTENTS + b"\xff\xff\xff\xff\x0f",  # truncated
        INPUT + b"\x05" + SHAPE + b"\x04\x01\x01\x01",  # longer than the enclosing message
        11 * b"\xff",  # endless varint
        b"\x3f",  # invalid wire type
    ],
)
def test_malformed_messages_raise(message: bytes) -> None:
    with pytest.raises(DecodeError):
        check_message(message, KIND)
    with pytest.raises(DecodeError):
        ModelInferRequest.FromString(message)


def test_memory_per_message_is_bounded(
    wide_bundle: Path, picture: Callable[..., bytes], tmp_path: Path
) -> None:
    empty_inputs = 10 * MIB * sized(INPUT, b"")  # 0.9 GB when parsed
    many_ids = 10 * MIB * sized(b"\x0a", b"")
    log = tmp_path / "log"
    with (
        server_process(wide_bundle, log) as (process, address),
        grpc.insecure_channel(address, [("grpc.max_send_message_length", -1)]) as channel,
    ):
        before = peak_memory_of(process.pid)
        for method, message in (
            ("maskrcnn.v1.Detector/Detect", many_ids),
            ("maskrcnn.v1.Detector/DetectStream", many_ids),
            ("inference.GRPCInferenceService/ModelInfer", empty_inputs),
            ("inference.GRPCInferenceService/ModelStreamInfer", empty_inputs),
        ):
            call: Any = channel.stream_stream(f"/{method}")
            with pytest.raises(grpc.RpcError, match="more than 4096 fields") as caught:
                list(call(iter([message]), timeout=60))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
        assert peak_memory_of(process.pid) < before + 8 * len(empty_inputs)
        image = picture() + bytes(20 * MIB)
        for method, request in (
            ("maskrcnn.v1.Detector/Detect", DetectRequest(image=image)),
            ("inference.GRPCInferenceService/ModelInfer", infer_request(MODEL, image)),
        ):
            assert channel.unary_unary(f"/{method}")(request.SerializeToString(), timeout=60)
    assert "Traceback" not in log.read_text()


class SilentCall:
    """gRPC context of a call whose client sends nothing."""

    def peer(self) -> str:
        return "a"

    async def read(self) -> bytes:
        await asyncio.Event().wait()
        return b""


async def test_each_wait_has_its_own_deadline() -> None:
    pending = PendingMessages(8)
    silent = SilentCall()
    limit_s = 0.2

    async def wait() -> float:
        start = time.monotonic()
        with pytest.raises(ExpiredError, match=r"within 0\.2 s"):
            await pending.next(silent, limit_s)
        return time.monotonic() - start

    async with asyncio.TaskGroup() as tasks:
        waits = []
        for _ in range(3):
            waits.append(tasks.create_task(wait()))
            await asyncio.sleep(limit_s / 2)
        unlimited = asyncio.create_task(pending.next(silent, None))
    assert min(task.result() for task in waits) >= limit_s
    assert not unlimited.done()
    unlimited.cancel()
    with pytest.raises(asyncio.CancelledError):
        await unlimited


async def test_shorter_wait_ends_before_a_longer_one() -> None:
    pending = PendingMessages(8)
    longer = asyncio.create_task(pending.next(SilentCall(), 60))
    await asyncio.sleep(0)
    with pytest.raises(ExpiredError):
        await asyncio.wait_for(pending.next(SilentCall(), 0.01), 10)
    assert not longer.done()
    longer.cancel()


async def test_expired_wait_after_an_ignored_cancellation() -> None:
    task = asyncio.current_task()
    assert task
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(1)
    with pytest.raises(ExpiredError):
        await PendingMessages(8).next(SilentCall(), 0.01)
    task.uncancel()


async def test_expired_wait_frees_its_call_without_a_garbage_collection() -> None:
    gc.disable()
    try:
        call = SilentCall()
        reference = weakref.ref(call)
        with pytest.raises(ExpiredError):
            await PendingMessages(8).next(call, 0.01)
        del call
        await asyncio.sleep(0)  # until then, asyncio refers to the cancellation
        assert reference() is None
    finally:
        gc.enable()
