"""Fixtures: encoded images, a server in this process on a real socket, and an S3 store."""

import os
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundle_copies import linked_copy
from gated_engine import Gate, gated_engines
from in_process_server import served_in_thread
from PIL import Image
from shared_exports import made_once

from maskrcnn_trt.serving.offline import Detector

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


@pytest.fixture(scope="session")
def wide_bundle(bundle: Path, shared_folder: Path) -> Path:
    """The tiny bundle for wide images only. A worker process loads it faster than `bundle`."""
    from maskrcnn_trt.model.bundle.manifest import read_manifest, write_manifest

    def write(path: Path) -> None:
        folder, manifest = linked_copy(bundle, path.with_suffix(".partial")), read_manifest(bundle)
        (folder / "manifest.json").unlink()
        write_manifest(folder, manifest.model_copy(update={"artifacts": manifest.artifacts[:1]}))
        folder.rename(path)

    return made_once(shared_folder / "wide-bundle", write)


# One server per module, because its background work and log lines would disturb other modules.
@pytest.fixture(scope="module")
def address(bundle: Path) -> Iterator[str]:
    """Address of a running server of the tiny bundle."""
    with served_in_thread(bundle, max_delay_ms=2, max_batch=4, max_message_mb=2) as address:
        yield address


@pytest.fixture(scope="module")
def predictor(bundle: Path) -> Iterator[Detector]:
    """Detector that computes the detections that a server of the tiny bundle should return."""
    with Detector(bundle) as predictor:
        yield predictor


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Gate in front of the engine of every server in the test."""
    with gated_engines(tmp_path) as gate:
        yield gate


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
