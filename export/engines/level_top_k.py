"""Selection of the best anchors of each feature map by a TopK of its own."""

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import helper, numpy_helper


def split_top_k(graph: onnx.GraphProto) -> None:
    """Replace a TopK over rows that were padded to a common length by one per row, in place.

    `Pad` of L tensors [B, N_l] to [B, N], `Unsqueeze`, `Concat` to [B, L, N], `Max` and `TopK` of k
    become `Pad` to [B, k] if N_l < k, `Max` and `TopK` of [B, N_l], and `Concat` to [B, L, k]. The
    results are the same. With the maps of a pyramid, only a quarter of the entries is sorted.
    """
    producers = {name: node for node in graph.node for name in node.output}
    for node in [node for node in graph.node if node.op_type == "TopK"]:
        maximum = producers.get(node.input[0])
        stack = producers.get(maximum.input[0]) if maximum and maximum.op_type == "Max" else None
        if stack is None or stack.op_type != "Concat":
            continue
        rows = [producers.get(name) for name in stack.input]
        pads = [producers.get(row.input[0]) for row in rows if row and row.op_type == "Unsqueeze"]
        if len(pads) < len(rows) or not all(pad and pad.op_type == "Pad" for pad in pads):
            continue
        lowest, axis = maximum.input[1], rows[0].input[1]
        nodes = list(_nodes(graph, node, [pad for pad in pads if pad], lowest, axis))
        place = list(graph.node).index(node)
        for offset, new in enumerate(nodes):
            graph.node.insert(place + offset, new)
        for old in (node, maximum, stack, *rows, *pads):
            graph.node.remove(old)
        used = {name for other in graph.node for name in other.input}
        for constant in [c for c in graph.initializer if c.name not in used]:
            graph.initializer.remove(constant)


def _nodes(
    graph: onnx.GraphProto,
    top_k: onnx.NodeProto,
    pads: list[onnx.NodeProto],
    lowest: str,
    axis: str,
) -> Iterator[onnx.NodeProto]:
    """Yield the new nodes. `lowest` and `axis` are the second inputs of `Max` and `Unsqueeze`."""
    shapes = {value.name: value.type.tensor_type.shape.dim for value in graph.value_info}
    constants = {value.name: value for value in graph.initializer}
    k = int(numpy_helper.to_array(constants[top_k.input[1]]).item())
    for level, pad in enumerate(pads):
        name, (values, _, fill) = f"{top_k.name}_level_{level}", pad.input[:3]
        missing = k - shapes[values][-1].dim_value
        if missing > 0:
            amounts = numpy_helper.from_array(np.array([0, 0, 0, missing]), f"{name}_pads")
            graph.initializer.append(amounts)
            yield helper.make_node("Pad", [values, amounts.name, fill], [f"{name}_padded"])
            values = f"{name}_padded"
        yield helper.make_node("Max", [values, lowest], [f"{name}_finite"])
        found = [f"{name}_values", f"{name}_indices"]
        chosen = helper.make_node("TopK", [f"{name}_finite", top_k.input[1]], found)
        chosen.attribute.extend(top_k.attribute)
        yield chosen
        for kind in found:
            yield helper.make_node("Unsqueeze", [kind, axis], [f"{kind}_row"])
    for kind, output in zip(("values", "indices"), top_k.output, strict=True):
        rows = [f"{top_k.name}_level_{level}_{kind}_row" for level in range(len(pads))]
        yield helper.make_node("Concat", rows, [output], axis=1)
