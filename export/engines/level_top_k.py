"""ONNX graph pass: select the best anchors of each feature map with a separate TopK."""

from collections.abc import Iterable, Iterator

import numpy as np
import onnx
from onnx import helper, numpy_helper


def split_top_k(graph: onnx.GraphProto) -> None:
    """Replace the TopK over the padded scores of all feature maps by one TopK per map, in place.

    An exported model selects the k best anchors of each of L feature maps. It pads the scores of
    each map from [B, N_l] to [B, N], where N is the largest N_l, concatenates them to [B, L, N],
    and applies one `Max` and one `TopK`. `Max` replaces -inf by a finite number that is below all
    scores. After this pass, each map has a separate `Max` and `TopK`, and the results are
    concatenated to [B, L, k]. Only maps with N_l < k are padded, to [B, k].

    The results are the same. In a feature pyramid with five maps, about a quarter of the padded
    entries [B, L, N] are scores, and the rest is padding that the new TopK nodes need not sort.
    """
    producers = {name: node for node in graph.node for name in node.output}

    def sources(names: Iterable[str], op_type: str) -> list[onnx.NodeProto]:
        """Return the nodes that output the tensors `names`, or [] if any has another operator type.

        Tensors that no node outputs are skipped.
        """
        nodes = [producers[name] for name in names if name in producers]
        return nodes if all(node.op_type == op_type for node in nodes) else []

    for top_k in [node for node in graph.node if node.op_type == "TopK"]:
        maxima = sources(top_k.input[:1], "Max")
        stacks = sources((maximum.input[0] for maximum in maxima), "Concat")
        names = [name for stack in stacks for name in stack.input]
        rows = sources(names, "Unsqueeze")
        pads = sources((row.input[0] for row in rows), "Pad")
        if not pads or len(pads) < len(names):
            continue
        lowest, axis = maxima[0].input[1], rows[0].input[1]
        place = list(graph.node).index(top_k)
        for offset, new in enumerate(_replacement(graph, top_k, pads, lowest, axis)):
            graph.node.insert(place + offset, new)
        for old in (top_k, *maxima, *stacks, *rows, *pads):
            graph.node.remove(old)
        used = {name for other in graph.node for name in other.input}
        for constant in [c for c in graph.initializer if c.name not in used]:
            graph.initializer.remove(constant)


def _replacement(
    graph: onnx.GraphProto,
    top_k: onnx.NodeProto,
    pads: list[onnx.NodeProto],
    lowest: str,
    axis: str,
) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that replace a TopK. Add their constants to the graph.

    Args:
        graph: graph of the TopK.
        top_k: node to replace.
        pads: for each feature map, the `Pad` node that pads its scores to a common number.
        lowest: name of a constant, a finite lower bound of the scores. It becomes the second input
            of the new `Max` nodes.
        axis: name of the constant that becomes the input `axes` of the new `Unsqueeze` nodes.
    """
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
