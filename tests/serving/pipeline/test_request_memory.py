"""Memory of queued and of rejected requests."""

import asyncio
import contextlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from in_process_server import connected, status_of
from PIL import Image
from scraped_metrics import metrics_from_log
from server_load import memory_of, peak_memory_of, server_process
from triton_requests import MODEL, infer_request

from maskrcnn_trt.protos.inference import open_inference_pb2 as triton_pb
from maskrcnn_trt.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub

Encode = Callable[..., bytes]
# Bytes after the end of a JPEG, which decoders ignore.
_PADDING = bytes(8 << 20)
# Side of an image whose raw pixels take as much, and of one for typed contents.
_SIDE, _TYPED_SIDE = 1650, 1100
# Batch delay in milliseconds: batches wait until they are full.
_NEVER = "3600000"


@pytest.fixture(autouse=True)
def returned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the servers' allocator return freed messages to the system at once.

    By default, once a block was freed, glibc keeps blocks of that size (up to 32 MiB) in its heaps.
    """
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.setenv(name, "65536")


def pixels(side: int) -> triton_pb.ModelInferRequest:
    request = triton_pb.ModelInferRequest(model_name=MODEL)
    request.inputs.add(name="images", datatype="UINT8", shape=[1, side, side, 3])
    return request


def raw_pixels() -> triton_pb.ModelInferRequest:
    request = pixels(_SIDE)
    request.raw_input_contents.append(bytes(_SIDE * _SIDE * 3))
    return request


def typed_pixels() -> triton_pb.ModelInferRequest:
    request = pixels(_TYPED_SIDE)
    values = np.ones(_TYPED_SIDE * _TYPED_SIDE * 3, np.uint8)
    request.inputs[0].contents.uint_contents.extend(memoryview(values))  # type: ignore[arg-type]
    return request


def test_requests_are_freed_once_their_images_are_decoded(
    bundle: Path, picture: Encode, tmp_path: Path
) -> None:
    image = picture() + _PADDING
    detection = pb.DetectRequest(image=image)
    inferences = raw_pixels(), typed_pixels(), infer_request(MODEL, image)
    sent = sum(message.ByteSize() for message in (detection, detection, *inferences, *inferences))
    log = tmp_path / "log"
    options = "--metrics-port", "0", "--max-batch", "16", "--max-delay-ms", _NEVER

    async def ask(pid: int, address: str) -> None:
        metrics = metrics_from_log(log.read_text())
        async with grpc.aio.insecure_channel(address) as channel:
            detector: Any = DetectorStub(channel)
            triton: Any = GRPCInferenceServiceStub(channel)
            before = memory_of(pid)
            calls = [detector.Detect(detection), *map(triton.ModelInfer, inferences)]
            streams = detector.DetectStream(), triton.ModelStreamInfer()
            await streams[0].write(detection)
            for request in inferences:
                await streams[1].write(request)
            await metrics.becomes(8, "nv_inference_pending_request_count", model=MODEL, version="1")
            assert memory_of(pid) < before + sent / 2
            for call in (*calls, *streams):
                call.cancel()

    with server_process(bundle, log, *options) as (process, address):
        asyncio.run(ask(process.pid, address))


def test_images_in_decoding_stay_within_their_budget_and_their_memory_is_given_back(
    bundle: Path, tmp_path: Path
) -> None:
    """Six images of 72 MiB each, in eight threads, with a budget for one of them."""
    options = "--threads", "8", "--decode-memory-mb", "100", "--metrics-port", "0"
    log = tmp_path / "log"

    async def check(pid: int, address: str) -> None:
        async with contextlib.AsyncExitStack() as clients:
            stubs = [await clients.enter_async_context(connected(address)) for _ in range(6)]
            await stubs[0].Detect(pb.DetectRequest(image=black_png(100)))
            before = memory_of(pid)
            request = pb.DetectRequest(image=black_png(3000))
            await asyncio.gather(*(stub.Detect(request) for stub in stubs))
            assert peak_memory_of(pid) < peak_before + (150 << 20)
            assert memory_of(pid) < before + (40 << 20)
            code, message = await status_of(
                stubs[0].Detect(pb.DetectRequest(image=black_png(4000)))
            )
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert "decode_memory_mb" in message
            metrics = metrics_from_log(log.read_text())
            assert await metrics.value("maskrcnn_decode_memory_limit_bytes") == 100 << 20
            assert await metrics.value("maskrcnn_decode_memory_bytes") == 0

    with server_process(bundle, log, *options) as (process, address):
        peak_before = peak_memory_of(process.pid)
        asyncio.run(check(process.pid, address))


def black_png(side: int) -> bytes:
    """Return a black PNG of a few kB."""
    file = BytesIO()
    Image.new("1", (side, side)).save(file, "PNG")
    return file.getvalue()


def test_rejected_requests_are_freed_immediately(
    bundle: Path, picture: Encode, tmp_path: Path
) -> None:
    """Calls and streams of both protocols free them without a garbage collection."""
    image = picture()[:400] + _PADDING
    detection, inference = pb.DetectRequest(image=image), infer_request(MODEL, image)

    async def rejections(address: str) -> list[grpc.StatusCode]:
        async with grpc.aio.insecure_channel(address) as channel:
            detector: Any = DetectorStub(channel)
            triton: Any = GRPCInferenceServiceStub(channel)
            calls = detector.Detect(detection), triton.ModelInfer(inference)
            streams = detector.DetectStream(), triton.ModelStreamInfer()
            await streams[0].write(detection)
            await streams[1].write(inference)
            assert (await streams[0].read()).error.message
            assert (await streams[1].read()).error_message
            return [await call.code() for call in calls]

    with server_process(bundle, tmp_path / "log") as (process, address):
        asyncio.run(rejections(address))
        before = memory_of(process.pid)
        for _ in range(12):
            assert set(asyncio.run(rejections(address))) == {grpc.StatusCode.INVALID_ARGUMENT}
        # gRPC may still hold the last requests. If one of the methods leaked, twelve would be held.
        assert memory_of(process.pid) < before + 10 * len(image)
