"""Plugins against TensorRT's Python bindings, which are called as by its C++ side."""

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from cuda.bindings import nvrtc
from cuda.bindings.utils import get_minimal_required_cuda_ver_from_ptx_ver
from plugin_builder import Builder, PluginKernel, Shape, builder_of_plugin, evaluated
from tensorrt_stubs import load_tensorrt, missing_names, stubbed_environment

from maskrcnn_trt.plugins.nms_keep.kernel import nms_keep_kernel, nms_keep_launch
from maskrcnn_trt.plugins.pyramid_roi_align.kernel import (
    Pooling,
    forward_kernel,
    pyramid_roi_align_launch,
)
from maskrcnn_trt.plugins.runtime.compilation import (
    Kernel,
    compile_kernel,
    nvrtc_cuda_version,
)
from maskrcnn_trt.plugins.tensorrt import plugins as tensorrt_plugins
from maskrcnn_trt.plugins.tensorrt.plugins import (
    kernels_digest,
    plugin_errors,
    plugin_ptx_version,
    register_plugins,
)

MakeBuilder = Callable[[str, dict[str, Any]], Builder]
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
def builder_of(trt: ModuleType, monkeypatch: pytest.MonkeyPatch) -> MakeBuilder:
    return partial(builder_of_plugin, trt, monkeypatch)


def test_plugins_can_be_registered_again(trt: ModuleType) -> None:
    names = ("DecodeBoxes", "NmsKeep", "PyramidRoIAlign", "SingleMapRoIAlign")
    for _ in range(2):
        assert register_plugins(ARCHITECTURE) == {f"maskrcnn::{name}": "1" for name in names}
    assert all(trt.get_plugin_registry().get_creator(name, "1", "maskrcnn") for name in names)


def test_nms_keep_launch_equals_the_torch_operation(
    trt: ModuleType, builder_of: MakeBuilder
) -> None:
    builder = builder_of("NmsKeep", NMS)
    types = (trt.float32, trt.int64)
    output_type, sizes = builder.output(types, dynamic(NMS_SHAPES))
    assert output_type == trt.int32
    assert evaluated(sizes, NMS_SHAPES) == (5, 1000)
    io_types, io_shapes = (*types, trt.int32), dynamic([*NMS_SHAPES, (5, 1000)])
    linear = ("LINEAR",) * 3
    assert builder.combinations(io_types, io_shapes) == {(io_types, linear)}
    kernel = builder.kernel(io_types, io_shapes, linear)
    assert kernel.launch(NMS_SHAPES) == nms_keep_launch(5, 1000)
    expected = nms_keep_kernel(float(np.float32(0.7)), 1000, "int")
    assert kernel.ptx == expected_ptx(expected, kernel.entry)
    assert kernel_parameters(kernel) == "PP" + "I" + "P"


def test_kernels_of_other_constants_have_other_names(
    trt: ModuleType, builder_of: MakeBuilder
) -> None:
    """One plan can hold both."""
    types, shapes = (trt.float32, trt.int64), NMS_SHAPES
    names = set()
    for keep in (100, 1000, 1000):
        builder = builder_of("NmsKeep", {**NMS, "max_keep": keep})
        builder.output(types, shapes)
        kernel = builder.kernel((*types, trt.int32), [*shapes, shapes[1]], ["LINEAR"] * 3)
        assert f".entry {kernel.entry}(".encode() in kernel.ptx
        names.add(kernel.entry)
    assert len(names) == 2


@pytest.mark.parametrize(
    ("type_name", "kind", "map_format", "pooled_format"),
    [
        ("float32", "float", "LINEAR", "LINEAR"),
        ("float32", "float", "HWC", "LINEAR"),
        ("float16", "float16", "LINEAR", "LINEAR"),
        ("float16", "float16", "HWC8", "HWC8"),
        ("bfloat16", "bfloat16", "HWC8", "LINEAR"),
    ],
)
@pytest.mark.parametrize(
    ("name", "attributes", "maps"),
    [("PyramidRoIAlign", POOLING, MAPS), ("SingleMapRoIAlign", SINGLE_POOLING, MAPS[2:3])],
)
def test_roi_align_launch_equals_the_torch_operation(
    trt: ModuleType,
    builder_of: MakeBuilder,
    name: str,
    attributes: dict[str, Any],
    maps: list[tuple[int, ...]],
    type_name: str,
    kind: str,
    map_format: str,
    pooled_format: str,
) -> None:
    builder = builder_of(name, attributes)
    features = getattr(trt, type_name)
    types, shapes = (*[features] * len(maps), trt.float32), [*maps, ROIS]
    side = attributes["output_size"]
    output_type, sizes = builder.output(types, dynamic(shapes))
    assert output_type == features
    pooled = (2000, 256, side, side)
    assert evaluated(sizes, shapes) == pooled

    io_types, io_shapes = (*types, features), dynamic([*shapes, pooled])
    singles, halves, bfloats = (
        (*[kind] * len(maps), trt.float32, kind)
        for kind in (trt.float32, trt.float16, trt.bfloat16)
    )

    def formats(map_format: str, pooled_format: str) -> tuple[str, ...]:
        return (*[map_format] * len(maps), "LINEAR", pooled_format)

    assert builder.combinations(io_types, io_shapes) == {
        *((types, formats("LINEAR", "LINEAR")) for types in (singles, halves, bfloats)),
        *((singles, formats("HWC", pooled)) for pooled in ("LINEAR", "HWC")),
        *((t, formats("HWC8", pooled)) for t in (halves, bfloats) for pooled in ("LINEAR", "HWC8")),
    }
    captured = builder.kernel(io_types, io_shapes, formats(map_format, pooled_format))
    expected = pyramid_roi_align_launch(2, 1000, 256, [m[2:] for m in maps], side)
    assert captured.launch(shapes) == expected
    pooling = Pooling(
        **{
            **attributes,
            "spatial_scales": tuple(attributes["spatial_scales"]),
            "aligned": False,
            "inclusive": True,
        }
    )
    kernel = forward_kernel(
        pooling,
        kind,
        256,
        channels_last=map_format != "LINEAR",
        pooled_channels_last=pooled_format != "LINEAR",
    )
    assert captured.ptx == expected_ptx(kernel, captured.entry)
    assert kernel_parameters(captured) == "P" * (len(maps) + 1) + "I" * (1 + 2 * len(maps)) + "P"


def test_scales_that_old_bindings_repeat_are_restored(
    trt: ModuleType, builder_of: MakeBuilder
) -> None:
    types = (*[trt.float32] * 6,)
    entries = set()
    for scales in (POOLING["spatial_scales"], [1 / 4] * 4):
        builder = builder_of("PyramidRoIAlign", {**POOLING, "spatial_scales": scales})
        builder.output(types[:-1], [*MAPS, ROIS])
        shapes = [*MAPS, ROIS, (2000, 256, 7, 7)]
        entries.add(builder.kernel(types, shapes, ["LINEAR"] * 6).entry)
    assert len(entries) == 1


def test_half_channels_that_need_padding_use_linear_format(
    trt: ModuleType, builder_of: MakeBuilder
) -> None:
    builder = builder_of("SingleMapRoIAlign", SINGLE_POOLING)
    shapes = [(2, 12, 50, 84), ROIS]
    builder.output((trt.float16, trt.float32), shapes)
    types, shapes = (trt.float16, trt.float32, trt.float16), [*shapes, (2000, 12, 14, 14)]
    taken = builder.combinations(types, shapes)
    assert {formats for (kind, *_), formats in taken if kind == trt.float16} == {("LINEAR",) * 3}


def test_version_of_the_ptx() -> None:
    major, minor = nvrtc.nvrtcVersion()[1:]
    # NVIDIA's table: https://docs.nvidia.com/cuda/parallel-thread-execution/#release-notes
    required = get_minimal_required_cuda_ver_from_ptx_ver(plugin_ptx_version(ARCHITECTURE))
    assert required <= nvrtc_cuda_version() == 1000 * major + 10 * minor
    assert kernels_digest(ARCHITECTURE) == kernels_digest(ARCHITECTURE) != kernels_digest(80)


def test_missing_scales_and_too_many_boxes_are_rejected(
    trt: ModuleType, builder_of: MakeBuilder
) -> None:
    builder = builder_of("PyramidRoIAlign", {**POOLING, "spatial_scales": [0.25, 0.125]})
    plugin_errors()
    with pytest.raises(ValueError, match="one value per feature map: 4, not 2"):
        builder.output([trt.float32] * 5, [*MAPS, ROIS])
    assert plugin_errors() == ["spatial_scales must have one value per feature map: 4, not 2"]
    assert plugin_errors() == []
    builder = builder_of("NmsKeep", NMS)
    types, shapes = (trt.float32, trt.int64), [(1, 20000, 4), (1, 20000)]
    builder.output(types, shapes)
    with pytest.raises(ValueError, match="at most 16384 boxes per set, not 20000"):
        builder.kernel((*types, trt.int32), [*shapes, (1, 20000)], ["LINEAR"] * 3)
    assert len(plugin_errors()) == 1


@pytest.mark.parametrize("features", ["fpn", "c4"])
def test_plugins_accept_the_nodes_of_the_model(trt: ModuleType, features: str) -> None:
    pytest.importorskip("onnxscript")
    from maskrcnn_trt.export.onnx.functions import functions_for
    from maskrcnn_trt.model.config.schema import ModelConfig

    definitions = import_module("tensorrt.plugin").op.maskrcnn
    backbone = {"features": features, "fpn_norm": "none"}
    bodies = functions_for(ModelConfig.model_validate({"num_classes": 3, "backbone": backbone}))
    nodes = [body for body in bodies if hasattr(definitions, body.name)]
    assert len(nodes) == 3
    for body in nodes:
        definition = getattr(definitions, body.name)
        assert len(body.input) == len(definition.input_tensor_names)
        assert set(body.attribute) == set(definition.input_attrs)
        assert len(body.output) == definition.num_outputs


def test_plugins_can_be_added_to_a_network_by_hand(
    trt: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trt, "ITensor", str)
    attributes = {
        name: np.array(value, np.float32 if isinstance(value, float | list) else np.int32, ndmin=1)
        for name, value in POOLING.items()
    }
    pooling = import_module("tensorrt.plugin").op.maskrcnn.PyramidRoIAlign
    add = pooling("p2", "p3", "p4", "p5", "rois", **attributes)
    inputs, shape_inputs, plugin = add(trt.QuickPluginCreationRequest.STRICT_AOT)
    assert inputs == ["p2", "p3", "p4", "p5", "rois"]
    assert shape_inputs == []
    assert isinstance(plugin, trt.IPluginV3QuickAOTBuild)


def test_plugins_and_readme_use_existing_names_of_tensorrt(trt: ModuleType, tmp_path: Path) -> None:
    source = Path(tensorrt_plugins.__file__)
    process = Path(__file__).parents[1] / "support" / "plan_process.py"
    readme = tmp_path / "code.py"
    blocks = re.findall(r"```python\n(.*?)```", (source.parents[1] / "README.md").read_text(), re.S)
    readme.write_text("\n".join(blocks))
    for path in (source, readme):
        assert missing_names(path, "trtp", import_module("tensorrt.plugin")) == []
    engines = Path(__file__).with_name("test_tensorrt_plugin_engines.py")
    for path in (source, source.with_name("definitions.py"), readme, process, engines):
        assert missing_names(path, "trt", trt) == []
    (imported,) = re.findall(r"tensorrt\.plugins import (.*)", readme.read_text())
    assert all(hasattr(tensorrt_plugins, name) for name in imported.split(", "))
    readme.write_text("trt.Bulider(trt.BuilderFlag.TF32, trt.BuilderFlag.FP8X)")
    assert missing_names(readme, "trt", trt) == ["trt.BuilderFlag.FP8X", "trt.Bulider"]


def test_bindings_load_beside_tensorrt_rtx() -> None:
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


def dynamic(shapes: Sequence[Shape]) -> list[Shape]:
    """Return shapes whose first axis is dynamic."""
    return [(-1, *shape[1:]) for shape in shapes]


def expected_ptx(kernel: Kernel, entry: str) -> bytes:
    """Return the PTX of the torch operation's kernel under the name of the plugin's kernel."""
    assert re.fullmatch(rf"{kernel.name}_[0-9a-f]{{16}}", entry)
    return compile_kernel(kernel, ARCHITECTURE, "ptx", entry).rstrip(b"\0")


def kernel_parameters(kernel: PluginKernel) -> str:
    """Return the kernel's parameters in order: P for a pointer, I for an int32."""
    letters = {"u64": "P", "u32": "I"}
    (parameters,) = re.findall(rf"\.entry {kernel.entry}\((.*?)\)", kernel.ptx.decode(), re.DOTALL)
    return "".join(letters[kind] for kind in re.findall(r"\.param \.(\w+)", parameters))
