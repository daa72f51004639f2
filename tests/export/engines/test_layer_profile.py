"""Time by layer, with an engine that has two layers. Without a GPU, torch.cuda is replaced."""

import ctypes
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_engine_commands import rows_of

from maskrcnn_trt.export.engines.commands import table_of_times
from maskrcnn_trt.export.engines.inspection import inspected_layers
from maskrcnn_trt.export.engines.profiling import profile_layers
from maskrcnn_trt.export.errors import EngineError

SHAPES = {"images": (3, 8, 16), "image_sizes": (2,), "scores": (5,)}
DTYPES = {"images": np.uint8, "image_sizes": np.int64, "scores": np.float32}
RANGES = ((1, 1, 1), (2, 4, 4))


class Engine:
    """`ICudaEngine` and its context. Layers take 1 and 3 ms after the fifth run, before that 9."""

    num_io_tensors, num_optimization_profiles, fails = 3, 2, False
    profiler: Any = None
    runs = 0

    def __init__(self) -> None:
        self.addresses: dict[str, int] = {}

    def create_execution_context(self) -> "Engine":
        return self

    def get_tensor_name(self, index: int) -> str:
        return list(SHAPES)[index]

    def get_tensor_mode(self, name: str) -> bool:
        return name != "scores"

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name="FLOAT", numpy=DTYPES[name])

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return (-1, *SHAPES[name])

    def get_tensor_profile_shape(self, name: str, number: int) -> list[tuple[int, ...]]:
        return [(size, *SHAPES[name]) for size in RANGES[number]]

    def set_optimization_profile_async(self, number: int, stream: int) -> bool:
        self.profile = number
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.batch = shape[0]
        return shape[1:] == SHAPES[name]

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        self.runs += 1
        for name, ms in (("convolution", 1.0), ("plugin", 3.0)):
            if self.profiler is not None:
                self.profiler.report_layer_time(name, 9.0 if self.runs <= 5 else ms)
        return not self.fails

    def values(self, name: str, kind: Any) -> list[int]:
        count = self.batch * int(np.prod(SHAPES[name]))
        return list((kind * count).from_address(self.addresses[name]))


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> Any:
    stream = SimpleNamespace(cuda_stream=1, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    module: Any = ModuleType("tensorrt")  # hashable, unlike a namespace
    module.ILogger = module.IProfiler = object
    module.TensorIOMode = SimpleNamespace(INPUT=True)
    module.nptype = lambda dtype: dtype.numpy
    return module


def test_mean_times_without_the_warm_up(trt: Any) -> None:
    engine = Engine()
    times = profile_layers(trt, engine, 3, 4)
    assert times == {"convolution": 1.0, "plugin": 3.0}
    assert (engine.profile, engine.batch, engine.runs) == (1, 3, 9)
    assert rows_of(table_of_times(times, {"plugin": "PluginV3"})) == [
        ["plugin", "PluginV3", "3.000", "75.0%"],
        ["convolution", "", "1.000", "25.0%"],
        ["all", "", "4.000", ""],
    ]


def test_images_are_noise_of_full_size(trt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = Engine(), []

    def execute(stream: int) -> bool:
        pixels = engine.values("images", ctypes.c_uint8)
        seen.append((len(set(pixels)), engine.values("image_sizes", ctypes.c_int64)))
        return True

    monkeypatch.setattr(engine, "execute_async_v3", execute)
    assert profile_layers(trt, engine, 2, 1) == {}
    assert seen[-1][0] > 100
    assert seen[-1][1] == [8, 16, 8, 16]


def test_errors(trt: Any) -> None:
    with pytest.raises(EngineError, match=r"1 to 1, 2 to 4 images, not of 5"):
        profile_layers(trt, Engine(), 5, 1)
    engine = Engine()
    engine.fails = True
    with pytest.raises(EngineError, match="no error was logged"):
        profile_layers(trt, engine, 1, 1)


def test_engine_without_weights_is_an_error(trt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT then returns None instead of a context."""
    monkeypatch.setattr(Engine, "create_execution_context", lambda *_: None)
    with pytest.raises(EngineError, match="maskrcnn engine refit"):
        profile_layers(trt, Engine(), 1, 1)
    trt.ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED=2)
    with pytest.raises(EngineError, match="maskrcnn engine refit"):
        inspected_layers(trt, Engine())
