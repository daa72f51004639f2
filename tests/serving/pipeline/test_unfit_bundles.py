"""Invalid bundles, at the start of a server and at a reload."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from in_process_server import served
from triton_requests import MODEL, images_of
from tritonclient.grpc import aio as triton_aio
from tritonclient.utils import InferenceServerException

from maskrcnn_trt.model.bundle.manifest import BundleError, read_manifest, sha256_of, write_manifest

Encode = Callable[..., bytes]


@pytest.fixture
def own_bundle(bundle: Path, tmp_path: Path) -> Path:
    """Copy of the bundle that the test may change."""
    return Path(shutil.copytree(bundle, tmp_path / "bundle"))


def change(bundle: Path, **entries: Any) -> None:
    """Change entries of a bundle's manifest and of its preprocessing."""
    path = bundle / "manifest.json"
    content = json.loads(path.read_text())
    content["preprocessing"] |= entries.pop("preprocessing", {})
    path.write_text(json.dumps(content | entries))


async def error_of(call: Any) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        await call
    return str(caught.value.status()), caught.value.message()


def replace_manifest_by_folder(bundle: Path) -> None:
    (bundle / "manifest.json").unlink()
    (bundle / "manifest.json").mkdir()


INVALID: list[tuple[Callable[[Path], None], str]] = [
    (partial(change, categories=[]), "categories: Tuple should have at least 1 item"),
    (partial(change, model_name=f"{MODEL}\n"), "model_name: String should match pattern"),
    (partial(change, preprocessing={"min_size": 800, "max_size": 1333}), "the input size 96x160"),
    (replace_manifest_by_folder, "manifest.json cannot be read (Is a directory)"),
]


async def test_invalid_bundles_are_rejected(
    own_bundle: Path, picture: Encode, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = read_manifest(own_bundle)
    async with (
        served(own_bundle) as address,
        triton_aio.InferenceServerClient(address) as client,
    ):
        for spoil, words in INVALID:
            write_manifest(own_bundle, manifest)
            spoil(own_bundle)
            status, message = await error_of(client.load_model(MODEL))
            assert "FAILED_PRECONDITION" in status
            assert words in message
            with pytest.raises(BundleError) as caught:
                await served(own_bundle).__aenter__()
            assert words in str(caught.value)
        assert (await client.infer(MODEL, images_of(picture()))).as_numpy("scores").any()
    # gRPC logs harmless errors of its own through asyncio.
    ours = [record for record in caplog.records if record.name.startswith("maskrcnn_trt")]
    assert ours
    assert not any(record.exc_info for record in ours)


def add_to_labels(bundle: Path, surplus: int) -> None:
    """Add a constant to the labels that a bundle's models return."""
    manifest = read_manifest(bundle)
    artifacts = []
    for artifact in manifest.artifacts:
        model = onnx.load(bundle / artifact.path)
        for node in model.graph.node:  # subgraphs may use the name, too
            for names in (node.input, node.output):
                names[:] = ["own_labels" if name == "labels" else name for name in names]
        number = onnx.numpy_helper.from_array(np.array(surplus, np.int64), "surplus")
        model.graph.initializer.append(number)
        total = onnx.helper.make_node("Add", ["own_labels", "surplus"], ["labels"])
        model.graph.node.append(total)
        onnx.save(model, bundle / artifact.path)
        digest = sha256_of(bundle / artifact.path)
        artifacts.append(artifact.model_copy(update={"sha256": digest}))
    write_manifest(bundle, manifest.model_copy(update={"artifacts": tuple(artifacts)}))


@pytest.mark.parametrize("label", [0, 4])
async def test_label_without_a_category(
    own_bundle: Path, picture: Encode, caplog: pytest.LogCaptureFixture, label: int
) -> None:
    add_to_labels(own_bundle, label - 3)  # the model returns 3
    async with (
        served(own_bundle) as address,
        triton_aio.InferenceServerClient(address) as client,
    ):
        status, message = await error_of(client.infer(MODEL, images_of(picture())))
        assert "INTERNAL" in status
        assert "log" in message
    assert (
        f"the model returned label {label}, but the bundle's manifest has 3 categories"
        in caplog.text
    )
    assert "IndexError" not in caplog.text
