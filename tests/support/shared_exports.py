"""Exported models that all pytest-xdist workers of a test run share."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def folder_of_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the temporary folder that all workers of pytest-xdist have in common."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def made_once(path: Path, make: Callable[[Path], object]) -> Path:
    """Return `path`. If it does not exist, create it with `make` while other processes wait."""
    from filelock import FileLock

    with FileLock(f"{path}.lock"):
        if not path.exists():
            make(path)
    return path


@contextmanager
def cached_graphs(folder: Path) -> Iterator[None]:
    """Within the context, make `bundle_from_checkpoint` export each ONNX graph only once.

    Exported graphs are stored in `folder`. A stored graph is used if weights, configuration, input
    size and input type are equal. An export takes ten seconds even for a tiny model.
    """
    import onnx

    from maskrcnn_trt.export import bundle

    def graph(model: Any, bucket: object, input_dtype: object) -> onnx.ModelProto:
        key = hashlib.sha256(f"{model.config!r} {bucket} {input_dtype}".encode())
        for name, value in model.state_dict().items():
            key.update(f"{name} {value.dtype}".encode())
            key.update(value.contiguous().numpy().data)
        path = folder / f"{key.hexdigest()}.onnx"
        return onnx.load(
            made_once(path, lambda path: save(export(model, bucket, input_dtype), path))
        )

    def save(proto: onnx.ModelProto, path: Path) -> None:
        onnx.save(proto, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)

    export = bundle.onnx_from_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "onnx_from_model", graph)
        yield
