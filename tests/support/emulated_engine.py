"""Exported model whose custom nodes are executed outside of ONNX Runtime."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import helper
from plugin_emulator import (
    CapturedPlugin,
    LoadedKernel,
    captured_plugin,
    executed,
    own_architecture,
)
from torch import Tensor

from maskrcnn_trt.model.bundle.spec import INPUT_NAMES, OPSET_DOMAIN, OUTPUT_NAMES

# Function that executes a custom node. It takes the node, its attributes by name and its inputs,
# and returns its output.
Execute = Callable[[onnx.NodeProto, dict[str, Any], list[Tensor]], Tensor]


class EmulatedEngine:
    """ONNX model in which a function executes the custom nodes, and ONNX Runtime all others."""

    def __init__(self, model: onnx.ModelProto, execute: Execute) -> None:
        self._model, self._execute = model, execute
        self._custom = [node for node in model.graph.node if node.domain == OPSET_DOMAIN]
        self._sessions: dict[tuple[str, ...], onnxruntime.InferenceSession] = {}

    def infer(self, images: NDArray[Any], image_sizes: NDArray[Any]) -> list[NDArray[Any]]:
        """Run the model. Return its outputs in the order of `OUTPUT_NAMES`."""
        known = dict(zip(INPUT_NAMES, (images, image_sizes), strict=True))
        for node in self._custom:
            self._compute(node.input, known)
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            inputs = [torch.from_numpy(known[name]) for name in node.input]
            known[node.output[0]] = self._execute(node, attributes, inputs).numpy()
        self._compute(OUTPUT_NAMES, known)
        return [known[name] for name in OUTPUT_NAMES]

    def _compute(self, names: Iterable[str], known: dict[str, NDArray[Any]]) -> None:
        """Compute those tensors of `names` that `known` lacks, and add them to `known`.

        No custom node may be between the known tensors and these tensors.
        """
        missing = tuple(name for name in dict.fromkeys(names) if name not in known)
        if not missing:
            return
        if missing not in self._sessions:
            part = _part_of(self._model, missing, known).SerializeToString()
            available = onnxruntime.get_available_providers()
            wanted = ("CUDAExecutionProvider", "CPUExecutionProvider")
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 3
            self._sessions[missing] = onnxruntime.InferenceSession(
                part, options, providers=[name for name in wanted if name in available]
            )
        session = self._sessions[missing]
        feeds = {given.name: known[given.name] for given in session.get_inputs()}
        known.update(zip(missing, session.run(missing, feeds), strict=True))


def _part_of(
    model: onnx.ModelProto, wanted: Sequence[str], known: Mapping[str, NDArray[Any]]
) -> onnx.ModelProto:
    """Return the part of a model that computes the tensors `wanted` from the tensors `known`."""
    needed, nodes = set(wanted), []
    for node in reversed(model.graph.node):
        if needed.intersection(node.output).difference(known):
            assert node.domain != OPSET_DOMAIN
            nodes.append(node)
            needed.update(_names_read_by(node))
    part = onnx.ModelProto()
    part.CopyFrom(model)
    del part.functions[:], part.graph.node[:], part.graph.input[:], part.graph.output[:]
    del part.graph.value_info[:]
    part.graph.node.extend(reversed(nodes))
    part.graph.input.extend(
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(known[name].dtype), [None] * known[name].ndim
        )
        for name in known
        if name in needed
    )
    part.graph.output.extend(map(helper.make_empty_tensor_value_info, wanted))
    return part


def _names_read_by(node: onnx.NodeProto) -> set[str]:
    names = set(node.input)
    for attribute in node.attribute:
        for inner in attribute.g.node:
            names |= _names_read_by(inner)
    return names


class PluginExecutor:
    """Function of type `Execute` that runs a custom node with the CUDA kernel of its plugin.

    Feature maps and pooled features are channels-last: fp32 in HWC, fp16 in HWC8. The kernel is
    loaded when its node first runs, and used for all later batches.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, tuple[CapturedPlugin, LoadedKernel]] = {}

    def __call__(
        self, node: onnx.NodeProto, attributes: dict[str, Any], inputs: list[Tensor]
    ) -> Tensor:
        if node.output[0] not in self._loaded:
            last = "HWC8" if inputs[0].dtype == torch.float16 else "HWC"
            plugin = captured_plugin(
                node.op_type, attributes, inputs, last, last, own_architecture()
            )
            self._loaded[node.output[0]] = plugin, LoadedKernel(plugin.kernel)
        return executed(*self._loaded[node.output[0]], inputs).cpu()
