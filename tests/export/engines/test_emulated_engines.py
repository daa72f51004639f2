"""Exported graphs with their custom nodes as plugins, executed as in a plan; needs no TensorRT."""

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from emulated_engine import EmulatedEngine, Execute, PluginExecutor
from torch import Tensor

from maskrcnn_trt.export.engines.engine_graph import load_model, plugin_graph_from_model
from maskrcnn_trt.export.verify import ReferenceBatch, compare_artifact
from maskrcnn_trt.model.bundle.manifest import read_manifest
from maskrcnn_trt.model.checkpoint import load_checkpoint
from maskrcnn_trt.model.mask_rcnn import BatchDetections
from maskrcnn_trt.plugins.box_deltas import decode_boxes
from maskrcnn_trt.plugins.nms_keep import nms_keep
from maskrcnn_trt.plugins.pyramid_roi_align import pyramid_roi_align

Noise = tuple[Tensor, Tensor]


def run_by_torch(node: onnx.NodeProto, attributes: dict[str, Any], inputs: list[Tensor]) -> Tensor:
    """Compute a custom node by the torch operation on the CPU."""
    values = {name: value for name, value in attributes.items() if name != "plugin_namespace"}
    if node.op_type == "NmsKeep":
        return nms_keep(*inputs, **values).int()
    if node.op_type == "DecodeBoxes":
        values["inclusive"] = bool(values["inclusive"])
        return decode_boxes(*inputs, **values, min_side=0.0)[0]
    flags = {name: bool(values[name]) for name in ("aligned", "inclusive")}
    return pyramid_roi_align(inputs[:-1], inputs[-1], **{**values, **flags}).flatten(0, 1)


def check_detections(execute: Execute, bundle: Path, checkpoint: Path, noise: Noise) -> None:
    """Compare the detections in batches of 8, 3 and 1 with the checkpoint's in fp32 on the CPU."""
    (artifact,) = (a for a in read_manifest(bundle).artifacts if str(a.bucket) == "96x160")
    model, plugins = plugin_graph_from_model(load_model(bundle / artifact.path))
    names = ("DecodeBoxes", "NmsKeep", "PyramidRoIAlign")
    assert plugins == [f"maskrcnn::{name}" for name in names]
    engine = EmulatedEngine(model, execute)
    torch_model = load_checkpoint(checkpoint).build_model()
    with torch.inference_mode():
        expected = torch_model.detect(*noise)
    batches = [
        ReferenceBatch(
            *(tensor[:count].numpy() for tensor in noise),
            BatchDetections(*(part[:count] for part in expected)),
            torch_model.config.roi.score_threshold,
        )
        for count in (8, 3, 1)
    ]
    comparison = compare_artifact(artifact, batches, engine.infer)
    assert comparison.images == 12
    assert comparison.detections > 0
    assert comparison.passed, comparison


def test_graph_is_cut_at_its_custom_nodes(
    bundle: Path, tiny_checkpoint: Path, smooth_noise: Noise
) -> None:
    check_detections(run_by_torch, bundle, tiny_checkpoint, smooth_noise)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_plugins_detect_as_the_checkpoint(
    request: pytest.FixtureRequest, precision: str, tiny_checkpoint: Path, smooth_noise: Noise
) -> None:
    path = request.getfixturevalue("bundle" if precision == "fp32" else "half_bundle")
    check_detections(PluginExecutor(), path, tiny_checkpoint, smooth_noise)
