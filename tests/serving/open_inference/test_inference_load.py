"""Model loads that fail or hang: the served model stays as it was."""

import asyncio
import contextlib
import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from bundle_copies import linked_copy
from gated_engine import Gate
from server_load import worker_pids
from triton_requests import MODEL
from tritonclient.utils import InferenceServerException
from unloadable_server import RunningServer, assert_serving, assert_unloaded, serving, until

from maskrcnn_trt.protos.inference import open_inference_pb2 as inference
from maskrcnn_trt.serving.pipeline import served_model

Encode = Callable[..., bytes]


async def test_failed_load_leaves_the_model_as_it_was(
    wide_bundle: Path,
    tmp_path: Path,
    picture: Encode,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = linked_copy(wide_bundle, tmp_path / "bundle")
    manifest = path / "manifest.json"
    failure = "the old model stays unloaded"
    load = inference.RepositoryModelLoadRequest(model_name=MODEL)

    async def fail_while_unloaded(server: RunningServer, reload: asyncio.Event) -> None:
        await server.triton.unload_model(MODEL)
        manifest.rename(path / "elsewhere")
        with pytest.raises(InferenceServerException, match="manifest") as caught:
            await server.triton.load_model(MODEL)
        assert "FAILED_PRECONDITION" in caught.value.status()
        await assert_unloaded(server, picture())
        reload.set()
        await until(lambda: caplog.text.count(failure) == 2)
        await assert_unloaded(server, picture())
        loading = server.inference.RepositoryModelLoad(load)
        await until(lambda: caplog.text.count(failure) == 3 or loading.cancel())
        gc.collect()
        assert "never retrieved" not in caplog.text

    async def hang_while_serving(server: RunningServer) -> None:
        manifest.unlink()
        os.mkfifo(manifest)  # opening it blocks
        monkeypatch.setattr(served_model, "START_TIMEOUT_S", 1.0)
        for _ in range(2):
            with pytest.raises(InferenceServerException, match="not ready after 1 s"):
                await server.triton.load_model(MODEL)
        await assert_serving(server, picture())

    reload = asyncio.Event()
    async with serving(path, caplog, reload) as server:
        await fail_while_unloaded(server, reload)
        (path / "elsewhere").rename(manifest)
        await server.triton.load_model(MODEL)
        await assert_serving(server, picture())
        await hang_while_serving(server)
    with contextlib.suppress(OSError):
        os.close(os.open(manifest, os.O_WRONLY | os.O_NONBLOCK))  # ends the threads
    assert f"unloaded model {MODEL}" in caplog.text
    assert f"reloaded the bundle of model {MODEL}" in caplog.text


async def test_hanging_load_is_cancelled(
    wide_bundle: Path,
    gate: Gate,
    picture: Encode,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(wide_bundle, caplog) as server:
        gate.close()
        with monkeypatch.context() as patched:
            patched.setattr(served_model, "START_TIMEOUT_S", 1.0)
            with pytest.raises(InferenceServerException, match="not ready after 1 s") as caught:
                await server.triton.load_model(MODEL)
        assert "FAILED_PRECONDITION" in caught.value.status()
        gate.open()
        await assert_serving(server, picture())
        assert len(worker_pids(os.getpid())) == 1
        await server.triton.load_model(MODEL)
        await assert_serving(server, picture())
