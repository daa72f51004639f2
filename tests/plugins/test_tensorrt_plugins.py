"""The plugins against TensorRT's own Python side, called as its C++ side calls it."""

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tensorrt_stubs import load_tensorrt, missing_names, stubbed_environment

from maskrcnn_trt.plugins import tensorrt_plugins
from maskrcnn_trt.plugins.compilation import Launch, compiled
from maskrcnn_trt.plugins.kernels.nms_keep import nms_keep_kernel, nms_keep_launch
from maskrcnn_trt.plugins.kernels.pyramid_roi_align import (
    Pooling,
    forward_kernel,
    pyramid_roi_align_launch,
)
from maskrcnn_trt.plugins.tensorrt_plugins import PLUGIN_NAMESPACE, register_plugins

ARCHITECTURE = 90
NMS = {"iou_threshold": 0.7, "max_keep": 1000}
POOLING = {
    "output_size": 7,
    "sampling_ratio": 2,
    "spatial_scales": [1 / 4, 1 / 8, 1 / 16, 1 / 32],
    "canonical_level": 4,
    "canonical_size": 224.0,
    "aligned": 0,
    "inclusive": 1,
}
SINGLE_POOLING = {**POOLING, "output_size": 14, "sampling_ratio": 0, "spatial_scales": [1 / 16]}
NMS_SHAPES = [(5, 1000, 4), (5, 1000)]
MAPS = [(2, 256, 200, 336), (2, 256, 100, 168), (2, 256, 50, 84), (2, 256, 25, 42)]
ROIS = (2, 1000, 4)


@pytest.fixture(scope="module")
def trt() -> ModuleType:
    module = load_tensorrt()
    register_plugins(ARCHITECTURE)
    return module


@pytest.fixture
def sizes(trt: ModuleType, monkeypatch: pytest.MonkeyPatch) -> type:
    """Expressions of sizes in place of TensorRT's, which only its builder can make."""

    class Size(trt.Dims):  # type: ignore[misc, name-defined]
        def __init__(self, value: int) -> None:
            super().__init__()
            self.value = value

        def is_constant(self) -> bool:
            return False

    monkeypatch.setattr(trt, "IDimensionExpr", Size)
    monkeypatch.setattr(trt, "DimsExprs", lambda length: [None] * length)
    return Size


class Builder:
    """Asks a plugin what TensorRT's builder asks, in its order."""

    def __init__(self, trt: ModuleType, size: type, plugin: Any) -> None:
        self._trt, self._size, self._plugin = trt, size, plugin

    def constant(self, value: int) -> Any:
        return self._size(value)

    def operation(self, operation: Any, first: Any, second: Any) -> Any:
        names = self._trt.DimensionOperation
        compute: dict[Any, Callable[[int, int], int]] = {
            names.SUM: lambda a, b: a + b,
            names.SUB: lambda a, b: a - b,
            names.PROD: lambda a, b: a * b,
            names.FLOOR_DIV: lambda a, b: a // b,
            names.CEIL_DIV: lambda a, b: -(-a // b),
        }
        return self._size(compute[operation](first.value, second.value))

    def output(self, types: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> tuple[Any, Any]:
        """Type and shape of the output."""
        (output_type,) = self._plugin.get_output_data_types(list(types), [len(s) for s in shapes])
        exprs = [[self._size(side) for side in shape] for shape in shapes]
        (shape,) = self._plugin.get_output_shapes(exprs, [], self)
        return output_type, tuple(side.value for side in shape)

    def combinations(self, types: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> set[Any]:
        """Combinations of types that the plugin takes, output included."""
        found = self._plugin.get_supported_format_combinations(
            self._tensors(types, shapes), len(types) - 1
        )
        assert all(tensor.format == self._trt.TensorFormat.LINEAR for tensor in found)
        rows = [found[start : start + len(types)] for start in range(0, len(found), len(types))]
        return {tuple(tensor.type for tensor in row) for row in rows}

    def kernel(
        self, types: Sequence[Any], shapes: Sequence[tuple[int, ...]]
    ) -> tuple[str, bytes, Launch]:
        """Name, PTX and launch of the kernel for types and shapes, output included."""
        tensors, inputs = self._tensors(types, shapes), len(types) - 1
        self._plugin.configure_plugin(tensors[:inputs], tensors[inputs:])
        self._plugin.set_tactic(0)
        launch, scalars = SimpleNamespace(), Scalars()
        self._plugin.get_launch_params(None, tensors, inputs, launch, scalars, self)
        descriptions = [tensor.desc for tensor in tensors]
        name, ptx = self._plugin.get_kernel(descriptions[:inputs], descriptions[inputs:])
        assert launch.shared_mem.value == 0
        grid = launch.grid_x.value, launch.grid_y.value, launch.grid_z.value
        block = launch.block_x.value, launch.block_y.value, launch.block_z.value
        values = tuple(scalars[index].value for index in range(scalars.nbSymExprs))
        return name, ptx, Launch(grid, block, values)

    def _tensors(self, types: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> list[Any]:
        tensors = []
        for type_, shape in zip(types, shapes, strict=True):
            description, tensor = self._trt.PluginTensorDesc(), self._trt.DynamicPluginTensorDesc()
            # The batch is dynamic.
            description.dims, description.type = (-1, *shape[1:]), type_
            description.format, description.scale = self._trt.TensorFormat.LINEAR, 1.0
            tensor.desc = description
            tensors.append(tensor)
        return tensors


class Scalars(dict[int, Any]):
    """Where a plugin puts the kernel's scalars."""

    nbSymExprs = 0  # noqa: N815


@pytest.fixture
def builder_of(
    trt: ModuleType, sizes: type, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Builder]:
    """Makes a plugin as TensorRT's ONNX parser does: of int32 and float32, in declared order."""
    expressions = import_module(sys.modules["tensorrt.plugin"].SymInt32.__module__)

    class Expression(expressions.SymExprImpl):  # type: ignore[misc, name-defined]
        def __init__(self, expression: Any) -> None:
            super().__init__(expression)
            self.value = expression._expr.value

    monkeypatch.setattr(expressions, "SymExprImpl", Expression)

    def make(name: str, attributes: dict[str, Any]) -> Builder:
        creator = trt.get_plugin_registry().get_creator(name, "1", PLUGIN_NAMESPACE)
        arrays = []
        fields = []
        for declared in creator.field_names:
            value = np.atleast_1d(attributes[declared.name])
            is_float = value.dtype.kind == "f"
            arrays.append(value.astype(np.float32 if is_float else np.int32))
            types = trt.PluginFieldType
            kind = types.FLOAT32 if is_float else types.INT32
            fields.append(trt.PluginField(declared.name, arrays[-1], kind))
        plugin = creator.create_plugin(
            name,
            PLUGIN_NAMESPACE,
            trt.PluginFieldCollection(fields),
            trt.TensorRTPhase.BUILD,
            trt.QuickPluginCreationRequest.UNKNOWN,
        )
        return Builder(trt, sizes, plugin)

    return make


def test_plugins_can_be_registered_again(trt: ModuleType) -> None:
    names = ("NmsKeep", "PyramidRoIAlign", "SingleMapRoIAlign")
    for _ in range(2):
        assert register_plugins(ARCHITECTURE) == {f"maskrcnn::{name}": "1" for name in names}
    assert all(trt.get_plugin_registry().get_creator(name, "1", "maskrcnn") for name in names)


def test_nms_keep_is_built_as_the_torch_operation_launches_it(
    trt: ModuleType, builder_of: Callable[..., Builder]
) -> None:
    builder = builder_of("NmsKeep", NMS)
    types = (trt.float32, trt.int64)
    assert builder.output(types, NMS_SHAPES) == (trt.bool, (5, 1000))
    io_types, io_shapes = (*types, trt.bool), [*NMS_SHAPES, (5, 1000)]
    assert builder.combinations(io_types, io_shapes) == {io_types}
    name, ptx, launch = builder.kernel(io_types, io_shapes)
    assert name == "nms_keep"
    assert launch == nms_keep_launch(5, 1000)
    assert ptx == expected_ptx(nms_keep_kernel(float(np.float32(0.7)), 1000))
    assert kernel_parameters(ptx) == "PP" + "I" + "P"


@pytest.mark.parametrize(("half", "kind"), [(False, "float"), (True, "float16")])
@pytest.mark.parametrize(
    ("name", "attributes", "maps"),
    [("PyramidRoIAlign", POOLING, MAPS), ("SingleMapRoIAlign", SINGLE_POOLING, MAPS[2:3])],
)
def test_roi_align_is_built_as_the_torch_operation_launches_it(
    trt: ModuleType,
    builder_of: Callable[..., Builder],
    name: str,
    attributes: dict[str, Any],
    maps: list[tuple[int, ...]],
    half: bool,
    kind: str,
) -> None:
    builder = builder_of(name, attributes)
    features = trt.float16 if half else trt.float32
    types, shapes = (*[features] * len(maps), trt.float32), [*maps, ROIS]
    side = attributes["output_size"]
    assert builder.output(types, shapes) == (features, (2, 1000, 256, side, side))

    io_types, io_shapes = (*types, features), [*shapes, (2, 1000, 256, side, side)]
    taken = builder.combinations(io_types, io_shapes)
    assert taken == {(*[t] * len(maps), trt.float32, t) for t in (trt.float32, trt.float16)}
    kernel_name, ptx, launch = builder.kernel(io_types, io_shapes)
    assert kernel_name == "pyramid_roi_align"
    assert launch == pyramid_roi_align_launch(2, 1000, 256, [m[2:] for m in maps], side)
    pooling = Pooling(
        **{
            **attributes,
            "spatial_scales": tuple(attributes["spatial_scales"]),
            "aligned": False,
            "inclusive": True,
        }
    )
    assert ptx == expected_ptx(forward_kernel(pooling, kind, 256, channels_last=False))
    assert kernel_parameters(ptx) == "P" * (len(maps) + 1) + "I" * (1 + 2 * len(maps)) + "P"


def test_more_boxes_than_the_kernel_remembers_are_refused(
    trt: ModuleType, builder_of: Callable[..., Builder]
) -> None:
    builder = builder_of("NmsKeep", NMS)
    types, shapes = (trt.float32, trt.int64), [(1, 20000, 4), (1, 20000)]
    builder.output(types, shapes)
    with pytest.raises(ValueError, match="NmsKeep takes at most 16384 boxes a set, not 20000"):
        builder.kernel((*types, trt.bool), [*shapes, (1, 20000)])


def test_a_map_without_its_scale_is_refused(
    trt: ModuleType, builder_of: Callable[..., Builder]
) -> None:
    builder = builder_of("PyramidRoIAlign", {**POOLING, "spatial_scales": [0.25, 0.125]})
    with pytest.raises(ValueError, match="4 feature maps have 2 spatial_scales"):
        builder.output([trt.float32] * 5, [*MAPS, ROIS])


def test_every_name_of_tensorrt_that_the_plugins_use_exists(trt: ModuleType) -> None:
    source, folder = Path(tensorrt_plugins.__file__), Path(__file__).parent
    assert missing_names(source, "trtp", sys.modules["tensorrt.plugin"]) == []
    for path in (source, folder / "plan_process.py", folder / "test_tensorrt_plugin_engines.py"):
        assert missing_names(path, "trt", trt) == []


def test_names_that_tensorrt_lacks_are_found(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("trt.Bulider(trt.BuilderFlag.TF32, trt.BuilderFlag.FP8X)")
    assert missing_names(source, "trt", load_tensorrt()) == ["trt.BuilderFlag.FP8X", "trt.Bulider"]


def test_the_bindings_load_in_a_fresh_process_beside_those_of_tensorrt_rtx() -> None:
    load_tensorrt()
    code = "import tensorrt.plugin, tensorrt_rtx; print(tensorrt.plugin.register.__module__)"
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=stubbed_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip().endswith("plugin._lib")


def expected_ptx(kernel: Any) -> bytes:
    return compiled(kernel, ARCHITECTURE, "ptx").rstrip(b"\0")


def kernel_parameters(ptx: bytes) -> str:
    """P a pointer, I an int32, in the order of the kernel's parameters."""
    letters = {"u64": "P", "u32": "I"}
    (parameters,) = re.findall(r"\.entry \w+\((.*?)\)", ptx.decode(), re.DOTALL)
    return "".join(letters[kind] for kind in re.findall(r"\.param \.(\w+)", parameters))
