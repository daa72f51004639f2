"""The real TensorRT bindings have every name that export uses."""

import inspect
import re
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest
from tensorrt_stubs import load_tensorrt, missing_names

from maskrcnn_trt.export.engines import build_log, profiling, refit, rtx_builder, tensorrt_builder
from maskrcnn_trt.export.engines import builder as engine_builder
from maskrcnn_trt.export.engines import inspection as engine_inspection
from maskrcnn_trt.plugins.tensorrt import log as tensorrt_log

BOTH = (build_log, engine_builder, engine_inspection, profiling, refit, tensorrt_log)
# Variable names in the code, and the classes of these variables.
CLASSES = {
    "builder": "Builder",
    "config": "IBuilderConfig",
    "context": "IExecutionContext",
    "engine": "ICudaEngine",
    "error": "ParserError",
    "inspector": "EngineInspector",
    "network": "INetworkDefinition",
    "onnx_refitter": "OnnxParserRefitter",
    "parser": "OnnxParser",
    "refitter": "Refitter",
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
def test_overridden_methods_exist(load) -> None:
    """A misspelt override would silently never be called."""
    module = load()
    for made, base in (
        (tensorrt_log.shared_logger(module), module.ILogger),
        (build_log.progress_monitor(module, None), module.IProgressMonitor),
        (profiling._layer_profiler(module, defaultdict(float)), module.IProfiler),
    ):
        own = [name for name in vars(type(made)) if not name.startswith("_")]
        assert own
        assert all(hasattr(base, name) for name in own)
