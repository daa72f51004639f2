"""Engines of one plugin each equal the torch operations, in a process without the plugin."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tensorrt_stubs import load_tensorrt, needs_tensorrt
from torch import Tensor

from maskrcnn_trt.plugins.nms_keep import nms_keep
from maskrcnn_trt.plugins.pyramid_roi_align import pyramid_roi_align
from maskrcnn_trt.plugins.tensorrt.plugins import register_plugins

pytestmark = [pytest.mark.tensorrt, needs_tensorrt]

MAX_BATCH = 4


@pytest.fixture(scope="module")
def trt() -> ModuleType:
    module = load_tensorrt()
    major, minor = torch.cuda.get_device_capability()
    register_plugins(10 * major + minor)
    return module


def test_nms_keep(trt: ModuleType, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(3, 500, 2, generator=generator) * 200
    boxes = torch.cat([corners, corners + torch.rand(3, 500, 2, generator=generator) * 60], dim=2)
    classes = torch.randint(-1, 4, (3, 500), generator=generator)
    inputs = {"boxes": boxes, "classes": classes}
    attributes = {"iou_threshold": 0.5, "max_keep": 100}
    keep = run_plugin(trt, "NmsKeep", inputs, attributes, tmp_path)
    assert torch.equal(keep.bool(), nms_keep(boxes, classes, **attributes))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float16, 1e-2)])
@pytest.mark.parametrize(
    ("name", "levels", "ratio"), [("PyramidRoIAlign", 4, 2), ("SingleMapRoIAlign", 1, 0)]
)
def test_roi_align(
    trt: ModuleType,
    tmp_path: Path,
    name: str,
    levels: int,
    ratio: int,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    generator = torch.Generator().manual_seed(0)
    maps = [
        torch.randn(3, 32, 64 >> level, 96 >> level, generator=generator).to(dtype)
        for level in range(levels)
    ]
    corners = torch.rand(3, 50, 2, generator=generator) * 200
    rois = torch.cat([corners, corners + torch.rand(3, 50, 2, generator=generator) * 150], dim=2)
    scales = [0.25 / 2**level for level in range(levels)]
    # `tensorrt.plugin` expects this order.
    attributes = {
        "output_size": 7,
        "sampling_ratio": ratio,
        "spatial_scales": scales,
        "canonical_level": 4,
        "canonical_size": 224.0,
        "aligned": 0,
        "inclusive": 0,
    }
    inputs = {**{f"feature_{level}": feature for level, feature in enumerate(maps)}, "rois": rois}
    pooled = run_plugin(trt, name, inputs, attributes, tmp_path)
    assert pooled.dtype == dtype
    expected = pyramid_roi_align(maps, rois, 7, ratio, scales, 4, 224.0, False, False)
    torch.testing.assert_close(pooled, expected.flatten(0, 1), atol=tolerance, rtol=tolerance)


def run_plugin(
    trt: ModuleType, name: str, inputs: dict[str, Tensor], attributes: dict[str, Any], folder: Path
) -> Tensor:
    """Build an engine of one plugin and run it in a process without the plugin."""
    files = [str(folder / file) for file in ("plugin.plan", "inputs.pt", "output.pt")]
    Path(files[0]).write_bytes(plan_of(trt, name, inputs, attributes))
    torch.save(inputs, files[1])
    process = Path(__file__).parents[1] / "support" / "plan_process.py"
    subprocess.run([sys.executable, process, *files], cwd=folder, check=True)
    output: Tensor = torch.load(files[2])
    return output


def plan_of(
    trt: ModuleType, name: str, inputs: dict[str, Tensor], attributes: dict[str, Any]
) -> bytes:
    """Build a plan in which the first axis of every input is dynamic."""
    builder = trt.Builder(trt.Logger(trt.Logger.WARNING))
    typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(typed if int(trt.__version__.split(".")[0]) < 11 else 0)
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    types = {torch.float32: trt.float32, torch.float16: trt.float16, torch.int64: trt.int64}
    tensors = []
    for tensor_name, tensor in inputs.items():
        batch, *shape = tensor.shape
        tensors.append(network.add_input(tensor_name, types[tensor.dtype], (-1, *shape)))
        profile.set_shape(tensor_name, (1, *shape), (batch, *shape), (MAX_BATCH, *shape))
    config.add_optimization_profile(profile)
    plugin = getattr(import_module("tensorrt.plugin").op.maskrcnn, name)
    fields = {
        name: np.array(value, np.int32 if isinstance(value, int) else np.float32, ndmin=1)
        for name, value in attributes.items()
    }
    output = network.add_plugin(plugin(*tensors, **fields), aot=True).get_output(0)
    output.name = "output"
    network.mark_output(output)
    return bytes(builder.build_serialized_network(network, config))
