"""Changes to an exported ONNX model before TensorRT builds an engine from it."""

from pathlib import Path

import onnx
from onnx import helper

from ...model.bundle.spec import OPSET_DOMAIN
from ...plugins.tensorrt.plugins import PLUGIN_NAMESPACE
from ..onnx.quantization import make_symmetric
from .level_top_k import split_top_k


def load_model(path: Path) -> onnx.ModelProto:
    """Load an exported ONNX file, and adapt it to TensorRT.

    The TopK over all feature maps becomes one TopK per feature map (`split_top_k`), and quantized
    values get symmetric ranges (`make_symmetric`).
    """
    model = onnx.load(path)
    split_top_k(model.graph)
    make_symmetric(model.graph)
    return model


def plugin_graph_from_model(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """Make an ONNX model's custom nodes use this project's TensorRT plugins, in place.

    Args:
        model: result of `load_model`; changed in place.

    Returns:
        the model, and the names of the plugins that it uses, as `namespace::name`.
    """
    nodes = [node for node in model.graph.node if node.domain == OPSET_DOMAIN]
    for node in nodes:
        # Without this attribute, the parser uses the node's function body instead of the plugin,
        # whatever the parser's flags.
        node.attribute.append(helper.make_attribute("plugin_namespace", PLUGIN_NAMESPACE))
    # Without function bodies, a missing plugin is an error. With function bodies, the parser would
    # silently use the body instead of the plugin.
    del model.functions[:]
    return model, sorted({f"{PLUGIN_NAMESPACE}::{node.op_type}" for node in nodes})
