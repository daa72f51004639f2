"""ONNX graph for TensorRT's plugins, options, and PTX. Tests of engines: test_engine_build.py."""

from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from pydantic import ValidationError

from maskrcnn_trt.export.engines.engine_graph import load_model, plugin_graph_from_model
from maskrcnn_trt.export.engines.options import EngineOptions
from maskrcnn_trt.export.engines.tensorrt_builder import check_ptx
from maskrcnn_trt.export.errors import EngineError
from maskrcnn_trt.model.bundle.manifest import read_manifest
from maskrcnn_trt.plugins.tensorrt.definitions import PLUGINS
from maskrcnn_trt.plugins.tensorrt.plugins import PLUGIN_NAMESPACE


@pytest.fixture
def path(half_bundle: Path) -> Path:
    (artifact,) = read_manifest(half_bundle).artifacts
    return half_bundle / artifact.path


def test_nodes_name_their_plugins_and_have_no_bodies(path: Path) -> None:
    model, plugins = plugin_graph_from_model(load_model(path))
    names = ("DecodeBoxes", "NmsKeep", "PyramidRoIAlign")
    assert plugins == [f"maskrcnn::{name}" for name in names]
    assert not model.functions
    for node in (node for node in model.graph.node if node.domain):
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        assert attributes["plugin_namespace"] == b"maskrcnn"


def test_top_k_of_each_map_selects_the_same(bundle: Path) -> None:
    """Half of the maps have fewer anchors than are selected."""
    ort = pytest.importorskip("onnxruntime")
    path = bundle / read_manifest(bundle).artifacts[0].path
    models = onnx.load(path), load_model(path)
    counts = [[n.op_type for n in model.graph.node].count("TopK") for model in models]
    assert counts[1] == counts[0] + 4
    sessions = [ort.InferenceSession(model.SerializeToString()) for model in models]
    height, width = sessions[0].get_inputs()[0].shape[2:]
    for batch in (1, 3):
        images = np.random.default_rng(batch).integers(0, 256, (batch, 3, height, width), np.uint8)
        feeds = {"images": images, "image_sizes": np.array([[height, width]] * batch)}
        padded, split = (session.run(None, feeds) for session in sessions)
        assert padded[0].all()
        for own, other in zip(padded, split, strict=True):
            np.testing.assert_array_equal(own, other)


def test_parser_searches_plugins_by_namespace(path: Path) -> None:
    """TensorRT-RTX has the same parser but no plugins, so that every custom node fails."""
    trt = pytest.importorskip("tensorrt_rtx", reason="needs the wheel tensorrt-rtx")
    model, _ = plugin_graph_from_model(load_model(path))
    errors = parser_errors(trt, model)
    custom = [node.op_type for node in model.graph.node if node.domain]
    assert [operator for operator, _ in errors] == custom
    assert all("Plugin not found" in error for _, error in errors)


def test_parser_passes_attributes_in_the_order_and_type_of_the_plugins(path: Path) -> None:
    """TensorRT-RTX has the same parser. A creator of an older kind receives the attributes."""
    trt = pytest.importorskip("tensorrt_rtx", reason="needs the wheel tensorrt-rtx")
    received: list[tuple[str, Any, list[float]]] = []

    class Creator(trt.IPluginCreatorV3One):  # type: ignore[misc]
        def __init__(self, name: str, attributes: Iterable[str]) -> None:
            super().__init__()
            self.name, self.plugin_version, self.plugin_namespace = name, "1", PLUGIN_NAMESPACE
            unknown = trt.PluginFieldType.UNKNOWN
            fields = [trt.PluginField(key, np.array([]), unknown) for key in attributes]
            self.field_names = trt.PluginFieldCollection(fields)

        def create_plugin(self, name: str, fields: Any, phase: Any) -> None:
            values = ((f.name, f.type, np.ravel(f.data).tolist()) for f in fields)
            received.extend(values)  # the plugin itself is not needed, so the node fails

    model, _ = plugin_graph_from_model(load_model(path))
    names = {node.op_type for node in model.graph.node if node.domain}
    creators = {name: Creator(name, PLUGINS[name].attributes) for name in names}
    registry = trt.get_plugin_registry()
    kinds = {int: trt.PluginFieldType.INT32}
    assert all(registry.register_creator(c, PLUGIN_NAMESPACE) for c in creators.values())
    try:
        for node in (node for node in model.graph.node if node.domain):
            received.clear()
            ((_, error),) = parser_errors(trt, model_of(node))
            assert "Could not create the plugin" in error
            given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            assert received == [
                (key, kinds.get(kind, trt.PluginFieldType.FLOAT32), np.ravel(given[key]).tolist())
                for key, kind in PLUGINS[node.op_type].attributes.items()
            ]
    finally:
        for creator in creators.values():
            registry.deregister_creator(creator)


def model_of(node: onnx.NodeProto) -> onnx.ModelProto:
    """Return a model of one custom node, whose sizes are all dynamic."""
    ranks = {"boxes": (3, TensorProto.FLOAT), "classes": (2, TensorProto.INT64)}
    names = PLUGINS[node.op_type].inputs
    inputs = []
    for tensor, name in zip(node.input, names, strict=True):
        rank, kind = ranks.get(name, (3 if name == "rois" else 4, TensorProto.FLOAT))
        inputs.append(helper.make_tensor_value_info(tensor, kind, [*"abcd"][:rank]))
    outputs = [helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "one", inputs, outputs)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(node.domain, 1)]
    return helper.make_model(graph, opset_imports=opsets)


def parser_errors(trt: ModuleType, model: onnx.ModelProto) -> list[tuple[str, str]]:
    """Return operator and description of each error."""
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert not parser.parse(model.SerializeToString())
    errors = (parser.get_error(index) for index in range(parser.num_errors))
    return [(error.node_operator(), error.desc()) for error in errors]


@pytest.mark.parametrize(
    "options",
    [
        {"optimization_level": 6},
        {"aux_streams": -1},
        {"tiling": "most"},
        {"hardware_compatibility": "all"},
        {"batches": ()},
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(options))):
        EngineOptions(**options)


@pytest.mark.parametrize(("nvrtc", "driver"), [(13000, 13000), (13000, 13010), (13020, 13010)])
def test_nvrtc_must_not_be_newer_than_the_driver(nvrtc: int, driver: int) -> None:
    if nvrtc <= driver:
        check_ptx(nvrtc, driver)
    else:
        with pytest.raises(EngineError, match=r'CUDA 13\.2 .*13\.1 .*"nvidia-cuda-nvrtc<13\.2"'):
            check_ptx(nvrtc, driver)
