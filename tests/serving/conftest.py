"""Fixtures: encoded images, a server in this process on a real socket, and an S3 store."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gated_engine import Gate, GatedLoader
from PIL import Image

Encode = Callable[..., bytes]


@pytest.fixture(scope="session")
def picture() -> Encode:
    """Encoder of images of random tiles: `picture(seed, (height, width), codec, mode, ...)`."""

    def encode(
        seed: int = 0,
        size: tuple[int, int] = (120, 200),
        codec: str = "JPEG",
        mode: str = "RGB",
        **options: Any,
    ) -> bytes:
        height, width = size
        tiles = np.random.default_rng(seed).integers(0, 256, (-(-height // 16), -(-width // 16), 3))
        pixels = np.kron(tiles, np.ones((16, 16, 1)))[:height, :width].astype(np.uint8)
        file = BytesIO()
        Image.fromarray(pixels).convert(mode).save(file, codec, **options)
        return file.getvalue()

    return encode


@contextlib.contextmanager
def _server_in_thread(bundle: Path) -> Iterator[str]:
    from maskrcnn_trt.serving.config import ServeConfig
    from maskrcnn_trt.serving.server import detection_server

    ready: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        config = ServeConfig(port=0, max_batch=4, max_message_mb=2)
        async with detection_server(bundle, config) as address:
            ready.set_result((address, asyncio.get_running_loop(), stop))
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    address, loop, stop = ready.result(timeout=60)
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


# Per module: its background work and log lines would disturb the tests of other modules.
@pytest.fixture(scope="module")
def address(bundle: Path) -> Iterator[str]:
    """Address of a running server of the tiny bundle."""
    with _server_in_thread(bundle) as address:
        yield address


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Gate]:
    """Gate in front of the engine of every server in the test."""
    from maskrcnn_trt.serving.pipeline import served_model

    gate = Gate(tmp_path)
    monkeypatch.setattr(served_model, "BundleLoader", partial(GatedLoader, gate))
    yield gate
    gate.open()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of an S3-compatible store, with credentials in the environment."""
    moto = pytest.importorskip("moto.server")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    server = moto.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()
