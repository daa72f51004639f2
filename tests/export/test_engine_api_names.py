"""Every name of TensorRT that export uses is in the real bindings."""

import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest
from tensorrt_stubs import load_tensorrt, missing_names

from maskrcnn_trt.export import (
    build_progress,
    engine_build,
    engine_inspection,
    rtx_builder,
    tensorrt_builder,
)
from maskrcnn_trt.plugins import tensorrt_log

BOTH = (build_progress, engine_build, engine_inspection, tensorrt_log)
# What the code calls the objects, and their classes.
CLASSES = {
    "builder": "Builder",
    "config": "IBuilderConfig",
    "context": "IExecutionContext",
    "engine": "ICudaEngine",
    "error": "ParserError",
    "inspector": "EngineInspector",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "runtime": "Runtime",
    "shapes": "IOptimizationProfile",
}


def load_rtx() -> ModuleType:
    return pytest.importorskip("tensorrt_rtx", reason="needs the wheel tensorrt-rtx")


@pytest.mark.parametrize(
    ("source", "load"),
    [
        *((source, load) for source in BOTH for load in (load_tensorrt, load_rtx)),
        (tensorrt_builder, load_tensorrt),
        (rtx_builder, load_rtx),
    ],
    ids=lambda value: value.__name__.rpartition(".")[2],
)
def test_names_exist(source: ModuleType, load, tmp_path: Path) -> None:
    module = load()
    code = inspect.getsource(source).replace("self._trt", "trt")
    path = tmp_path / "source.py"
    path.write_text(code)
    assert missing_names(path, "trt", module) == []
    for variable, kind in CLASSES.items():
        for name in set(re.findall(rf"(?<![\w.]){variable}\.(\w+)", code)):
            assert hasattr(getattr(module, kind), name), f"{kind}.{name}"


@pytest.mark.parametrize("load", [load_tensorrt, load_rtx])
def test_what_is_overridden_is_there(load) -> None:
    """A misspelt override would silently never be called."""
    module = load()
    for made, base in (
        (tensorrt_log.shared_logger(module), module.ILogger),
        (build_progress.monitor_into(module, None), module.IProgressMonitor),
    ):
        own = [name for name in vars(type(made)) if not name.startswith("_")]
        assert own
        assert all(hasattr(base, name) for name in own)
