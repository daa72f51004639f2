"""Unload and reload of the model, as seen by clients of both protocols."""

import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from gated_engine import Gate
from in_process_server import status_of
from server_load import server_process, wait_until, worker_pids
from triton_requests import MODEL, images_of, infer_request
from tritonclient.grpc import InferenceServerClient
from unloadable_server import (
    UNLOADED,
    RunningServer,
    assert_serving,
    assert_unloaded,
    held_request,
    held_unload,
    serving,
    until,
    until_not_ready,
)

from maskrcnn_trt.protos.inference import open_inference_pb2 as inference
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb

Encode = Callable[..., bytes]


@pytest.fixture
def served(wide_bundle: Path, caplog: pytest.LogCaptureFixture) -> Any:
    """Return a function that serves the bundle within a context."""
    return partial(serving, wide_bundle, caplog)


async def test_unload_drains_requests_and_ends_the_workers(
    served: Any, gate: Gate, picture: Encode
) -> None:
    request = pb.DetectRequest(image=picture())
    async with served() as server:
        calls = [
            await held_request(server, gate, picture()),
            asyncio.ensure_future(server.detector.Detect(request)),
            asyncio.create_task(server.triton.infer(MODEL, images_of(picture()))),
        ]
        await server.metrics.becomes(3, "maskrcnn_requests_in_progress")
        unloading = asyncio.create_task(server.triton.unload_model(MODEL))
        await until_not_ready(server)
        await assert_unloaded(server, picture())
        assert len(worker_pids(os.getpid())) == 1
        assert not unloading.done()
        gate.open()
        first, second, third = await asyncio.gather(*calls)
        assert first.detections == second.detections
        assert third.as_numpy("num_detections") == len(first.detections)
        await unloading
        assert not worker_pids(os.getpid())


async def test_unloaded_model_is_described_and_can_be_reloaded(
    served: Any, picture: Encode
) -> None:
    engines = {"model": MODEL, "precision": "fp32"}
    reload = asyncio.Event()
    async with served(reload=reload) as server:
        triton = server.triton
        before = await triton.infer(MODEL, images_of(picture()))
        described = await server.detector.GetModel(pb.GetModelRequest())
        config = await triton.get_model_config(MODEL)
        for unload_dependents in (False, True, False):
            await triton.unload_model(MODEL, unload_dependents=unload_dependents)
            await assert_unloaded(server, picture())
        assert await server.detector.GetModel(pb.GetModelRequest()) == described
        assert await triton.get_model_config(MODEL) == config
        assert (await triton.get_model_metadata(MODEL)).name == MODEL
        (statistics,) = (await triton.get_inference_statistics(MODEL)).model_stats
        assert statistics.inference_stats.success.count == 1
        # Requests for unknown models are not counted.
        assert statistics.inference_stats.fail.count == 6
        assert await server.metrics.value("maskrcnn_engines_up", **engines) == 0
        assert await server.metrics.value("maskrcnn_rejected_total", reason="unloaded") == 6

        await triton.load_model(MODEL)
        await assert_serving(server, picture())
        after = await triton.infer(MODEL, images_of(picture()))
        np.testing.assert_array_equal(before.as_numpy("masks"), after.as_numpy("masks"))
        assert await server.metrics.value("maskrcnn_engines_up", **engines) == 1

        await triton.unload_model(MODEL)
        reload.set()
        await server.metrics.becomes(1, "maskrcnn_engines_up", **engines)
        await assert_serving(server, picture())


async def test_streams_continue_after_valid_and_invalid_unloads(
    served: Any, picture: Encode
) -> None:
    async with served() as server:
        detections = server.detector.DetectStream()
        inferences = server.inference.ModelStreamInfer()

        async def responses() -> tuple[Any, Any]:
            await detections.write(pb.DetectRequest(image=picture()))
            await inferences.write(infer_request(MODEL, picture()))
            return await detections.read(), await inferences.read()

        async def assert_streaming() -> None:
            detected, inferred = await responses()
            assert detected.response.detections
            assert inferred.infer_response.outputs

        await assert_streaming()
        for name, parameters, expected in (
            (f"{MODEL}-fp32", (), f"INVALID_ARGUMENT.* unload '{MODEL}'"),
            ("resnet", (), "NOT_FOUND.*model 'resnet' is not served"),
            (MODEL, ("config",), "INVALID_ARGUMENT.*unknown parameter 'config'"),
        ):
            request = inference.RepositoryModelUnloadRequest(model_name=name)
            for parameter in parameters:
                request.parameters[parameter].string_param = "{}"
            with pytest.raises(grpc.RpcError, match=rf"(?s){expected}"):
                await server.inference.RepositoryModelUnload(request)
        await assert_streaming()
        await server.triton.unload_model(MODEL)
        detected, inferred = await responses()
        assert detected.error.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert UNLOADED in detected.error.message
        assert UNLOADED in inferred.error_message
        await server.triton.load_model(MODEL)
        await assert_streaming()


async def test_loads_and_unloads_are_sequential(served: Any, gate: Gate, picture: Encode) -> None:
    async def unload_then_load(server: RunningServer) -> None:
        in_progress, unloading = await held_unload(server, gate, picture())
        loading = asyncio.create_task(server.triton.load_model(MODEL))
        gate.open()
        assert (await in_progress).detections
        await unloading
        await loading
        await assert_serving(server, picture())
        assert len(worker_pids(os.getpid())) == 1

    async def load_then_unload(server: RunningServer) -> None:
        in_progress = await held_request(server, gate, picture())
        number = gate.count
        loading = asyncio.create_task(server.triton.load_model(MODEL))
        await gate.comes_to(number + 1)  # warm-up
        unloading = asyncio.create_task(server.triton.unload_model(MODEL))
        gate.open()
        assert (await in_progress).detections
        await loading
        await unloading
        await assert_unloaded(server, picture())
        assert not worker_pids(os.getpid())

    async with served() as server:
        await unload_then_load(server)
        await load_then_unload(server)


async def test_unload_continues_without_its_client(
    served: Any, gate: Gate, picture: Encode
) -> None:
    async with served() as server:
        in_progress, unloading = await held_unload(server, gate, picture())
        unloading.cancel()
        gate.open()
        assert (await in_progress).detections
        await until(lambda: not worker_pids(os.getpid()))
        await assert_unloaded(server, picture())


@pytest.mark.slow
async def test_failed_worker_is_not_restarted_after_an_unload(
    served: Any, gate: Gate, picture: Encode
) -> None:
    async with served() as server:
        gate.break_with(RuntimeError("no memory"))
        for _ in range(3):
            call = server.detector.Detect(pb.DetectRequest(image=picture()))
            assert await call.code() is grpc.StatusCode.INTERNAL
        await server.triton.unload_model(MODEL)
        assert not worker_pids(os.getpid())
        gate.break_with(None)
        await server.triton.load_model(MODEL)
        await assert_serving(server, picture())


async def test_stop_during_an_unload_drains_requests(
    served: Any, gate: Gate, picture: Encode
) -> None:
    async with served() as server:
        in_progress, unloading = await held_unload(server, gate, picture())
        stopping = asyncio.create_task(server.stop())
        status, message = await status_of(unloading)
        assert status is grpc.StatusCode.UNAVAILABLE
        assert "stopping" in message
        gate.open()
        assert (await in_progress).detections
        await stopping
        assert not worker_pids(os.getpid())


@pytest.mark.slow
def test_signal_stops_a_server_without_model(wide_bundle: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        server_process(wide_bundle, log) as (process, address),
        InferenceServerClient(address) as client,
    ):
        client.unload_model(MODEL)
        assert not worker_pids(process.pid)
        process.send_signal(signal.SIGHUP)
        wait_until(client.is_server_ready)
        client.unload_model(MODEL)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    assert "Traceback" not in log.read_text()
