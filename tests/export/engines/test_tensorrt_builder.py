"""ONNX graph for TensorRT's plugins. Tests of engines: test_engine_build.py."""

from pathlib import Path

import onnx
import pytest
from onnx import helper

from maskrcnn_trt.export.engines.tensorrt_builder import plugin_graph_from_model
from maskrcnn_trt.model.bundle.manifest import read_manifest


@pytest.fixture
def path(half_bundle: Path) -> Path:
    (artifact,) = read_manifest(half_bundle).artifacts
    return half_bundle / artifact.path


def test_nodes_name_their_plugins_and_have_no_bodies(path: Path) -> None:
    model, plugins = plugin_graph_from_model(onnx.load(path))
    assert plugins == ["maskrcnn::NmsKeep", "maskrcnn::PyramidRoIAlign"]
    assert not model.functions
    for node in (node for node in model.graph.node if node.domain):
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        assert attributes["plugin_namespace"] == b"maskrcnn"


def test_parser_searches_plugins_by_namespace(path: Path) -> None:
    """TensorRT-RTX has the same parser but no plugins, so that every custom node fails."""
    trt = pytest.importorskip("tensorrt_rtx", reason="needs the wheel tensorrt-rtx")
    model, _ = plugin_graph_from_model(onnx.load(path))
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    assert not parser.parse(model.SerializeToString())
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    custom = [node.op_type for node in model.graph.node if node.domain]
    assert [error.node_operator() for error in errors] == custom
    assert all("Plugin not found" in error.desc() for error in errors)
