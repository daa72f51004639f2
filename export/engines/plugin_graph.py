"""ONNX models whose custom nodes use our TensorRT plugins."""

import onnx
from onnx import helper

from ...model.bundle.spec import OPSET_DOMAIN
from ...plugins.tensorrt.plugins import PLUGIN_NAMESPACE


def plugin_graph_from_model(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """Make an ONNX model's custom nodes use our TensorRT plugins, in place.

    Args:
        model: result of `onnx_from_model`; changed in place.

    Returns:
        the model, and the names of the plugins that it uses, as `namespace::name`.
    """
    nodes = [node for node in model.graph.node if node.domain == OPSET_DOMAIN]
    for node in nodes:
        # Without this attribute the parser uses the function body, whatever the parser's flags.
        node.attribute.append(helper.make_attribute("plugin_namespace", PLUGIN_NAMESPACE))
    # Without bodies the parser cannot fall back on one silently.
    del model.functions[:]
    return model, sorted({f"{PLUGIN_NAMESPACE}::{node.op_type}" for node in nodes})
