"""A model whose custom operations TensorRT takes from plugins."""

import onnx
from onnx import helper

from ..model.spec import OPSET_DOMAIN
from ..plugins.tensorrt_plugins import PLUGIN_NAMESPACE


def plugin_graph_from_model(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """Point the custom nodes at the plugins.

    The parser takes a function body, whatever its flags, unless the node names the plugin's
    namespace; and without bodies it cannot fall back on one unnoticed.

    Args:
        model: as `onnx_from_model` makes it; changed in place.

    Returns:
        the model, and the plugins that it needs, as `namespace::name`.
    """
    nodes = [node for node in model.graph.node if node.domain == OPSET_DOMAIN]
    for node in nodes:
        node.attribute.append(helper.make_attribute("plugin_namespace", PLUGIN_NAMESPACE))
    del model.functions[:]
    return model, sorted({f"{PLUGIN_NAMESPACE}::{node.op_type}" for node in nodes})
