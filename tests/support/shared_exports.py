"""Exported models that all pytest-xdist workers of a test run share."""

import hashlib
import os
import shutil
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
def cached_exports(folder: Path) -> Iterator[None]:
    """Within the context, make `bundle_from_checkpoint` export each model only once.

    Exported ONNX graphs and torch programs are stored in `folder`. A stored file is used if
    weights, configuration, input size and input type are equal. An export takes six seconds even
    for a tiny model.
    """
    import onnx
    import torch

    from maskrcnn_trt.export import bundle

    def stored(
        export: Callable[..., Any], write: Callable[[Any, Path], object], suffix: str
    ) -> Callable[..., Path]:
        def path_of(model: Any, bucket: object, input_dtype: object) -> Path:
            def make(path: Path) -> None:
                partial = path.with_suffix(".partial")
                write(export(model, bucket, input_dtype), partial)
                partial.replace(path)

            key = hashlib.sha256(f"{model.config!r} {bucket} {input_dtype}".encode())
            for name, value in model.state_dict().items():
                key.update(f"{name} {value.dtype}".encode())
                key.update(value.flatten().view(torch.uint8).numpy().data)
            return made_once(folder / f"{key.hexdigest()}{suffix}", make)

        return path_of

    graph = stored(bundle.onnx_from_model, onnx.save, ".onnx")
    program = stored(bundle.program_from_model, bundle.write_program, ".pt2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "onnx_from_model", lambda *args: onnx.load(graph(*args)))
        patch.setattr(bundle, "program_from_model", program)
        patch.setattr(bundle, "write_program", shutil.copy)
        yield
