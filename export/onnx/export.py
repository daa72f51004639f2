"""Conversion of a model to ONNX, with custom nodes and their function bodies."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import onnx
import torch
from onnx import helper, inliner
from torch import Tensor
from torch.onnx.ops import symbolic, symbolic_multi_out

from ...model.bundle.program import ignore_torch_warnings
from ...model.bundle.spec import INPUT_NAMES, OPSET_DOMAIN, OPSET_VERSION, OUTPUT_NAMES, ShapeBucket
from ...model.mask_rcnn import MaskRCNN
from ...plugins.box_deltas import are_large
from ...plugins.grid_anchors import grid_anchors_in_torch
from ...plugins.stable_top_k import top_k_of_parts_in_torch
from .functions import functions_for

OPSET = 18

# Finite number that replaces -inf before a TopK. ONNX Runtime's CUDA kernel pads its result with
# the lowest finite float32, then sorts it. Without the replacement, this padding, whose indices are
# undefined, would rank above entries of -inf.
_LOWEST = -1e38


def onnx_from_model(
    model: MaskRCNN, bucket: ShapeBucket, input_dtype: torch.dtype
) -> onnx.ModelProto:
    """Export a detection model to ONNX for one input size, with a dynamic batch size.

    NMS, RoIAlign and the decoding of boxes become nodes of the domain `maskrcnn`, each with a
    function body. All other operations become standard ONNX operators.

    Args:
        model: detector in evaluation mode, on the CPU.
        bucket: height and width of the input in pixels.
        input_dtype: `torch.uint8` or `torch.float32`. In both types, pixel values are 0..255.
    """
    # Use two images, because torch.export treats a batch size of one as a constant.
    images = torch.zeros(2, 3, *bucket, dtype=input_dtype)
    image_sizes = torch.tensor([list(bucket)] * 2)
    batch = {0: torch.export.Dim("batch", min=1)}
    with torch.no_grad(), _quiet_exporter():
        exported = torch.export.export(
            model, (images, image_sizes), dynamic_shapes={"images": batch, "image_sizes": batch}
        )
        with _custom_operations_replaced():
            program = torch.onnx.export(
                exported,
                input_names=list(INPUT_NAMES),
                output_names=list(OUTPUT_NAMES),
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
    assert program is not None
    proto = program.model_proto
    # Add the function bodies after the export, because the exporter's own passes would inline them.
    proto.functions.extend(_flattened(functions_for(model.config)))
    _name_batch_axis(proto.graph)
    _remove_reshapes_to_own_shape(proto.graph)
    return proto


def _flattened(functions: Sequence[onnx.FunctionProto]) -> Sequence[onnx.FunctionProto]:
    """Return ONNX functions in which all calls of other functions are inlined."""
    # If a function passes an attribute to another one, TensorRT's parser takes the attribute as
    # empty, and builds a wrong engine without an error.
    called = {(node.domain, node.op_type) for function in functions for node in function.node}
    helpers = [key for f in functions if (key := (f.domain, f.name)) in called]
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(OPSET_DOMAIN, OPSET_VERSION)]
    graph = helper.make_graph([], "bodies", [], [])
    model = helper.make_model(graph, functions=functions, opset_imports=opsets)
    return inliner.inline_selected_functions(model, helpers).functions


def _name_batch_axis(graph: onnx.GraphProto) -> None:
    """Rename the symbolic batch size of a graph to `batch`. The exporter generates another name."""
    generated = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = dim.dim_param.replace(generated, "batch")


def _remove_reshapes_to_own_shape(graph: onnx.GraphProto) -> None:
    """Remove Reshape nodes that do not change the shape, and constants that no node reads.

    The exporter adds a useless Reshape after each RoIAlign. TensorRT cannot keep feature maps
    channels-last across a Reshape.
    """
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in graph.value_info
    }
    for node in [node for node in graph.node if node.op_type == "Reshape"]:
        source, target = node.input[0], node.output[0]
        if source in shapes and shapes[source] == shapes.get(target):
            for user in graph.node:
                user.input[:] = [source if name == target else name for name in user.input]
            graph.node.remove(node)
    read = {name for node in graph.node for name in node.input}
    for constant in [constant for constant in graph.initializer if constant.name not in read]:
        graph.initializer.remove(constant)


def _nms_keep_node(boxes: Tensor, classes: Tensor, iou_threshold: float, max_keep: int) -> Tensor:
    # The node returns integers, because TensorRT plugins cannot return booleans.
    keep: Tensor = symbolic(
        f"{OPSET_DOMAIN}::NmsKeep",
        [boxes, classes],
        {"iou_threshold": iou_threshold, "max_keep": max_keep},
        dtype=torch.int32,
        shape=classes.shape,
        version=OPSET_VERSION,
    )
    return keep.to(torch.bool)


def _decode_boxes_node(
    deltas: Tensor,
    references: Tensor,
    indices: Tensor,
    image_sizes: Tensor,
    center_weight: float,
    size_weight: float,
    inclusive: bool,
    min_side: float,
) -> tuple[Tensor, Tensor]:
    boxes: Tensor = symbolic(
        f"{OPSET_DOMAIN}::DecodeBoxes",
        [deltas, references, indices, image_sizes],
        {
            "center_weight": center_weight,
            "size_weight": size_weight,
            "inclusive": int(inclusive),
        },
        dtype=torch.float32,
        shape=(*indices.shape, 4),
        version=OPSET_VERSION,
    )
    # `are_large` is computed outside of the node, because TensorRT plugins cannot return booleans.
    return boxes, are_large(boxes, min_side)


def _pyramid_roi_align_node(
    features: Sequence[Tensor],
    rois: Tensor,
    output_size: int,
    sampling_ratio: int,
    spatial_scales: Sequence[float],
    canonical_level: int,
    canonical_size: float,
    aligned: bool,
    inclusive: bool,
) -> Tensor:
    # A single map needs its own type of node, because a TensorRT plugin has a fixed number of
    # inputs.
    name = "PyramidRoIAlign" if len(features) > 1 else "SingleMapRoIAlign"
    batch, count = rois.shape[:2]
    # The node's output has four axes, because TensorRT has no channels-last formats for five.
    pooled: Tensor = symbolic(
        f"{OPSET_DOMAIN}::{name}",
        [*features, rois],
        {
            "output_size": output_size,
            "sampling_ratio": sampling_ratio,
            "spatial_scales": list(spatial_scales),
            "canonical_level": canonical_level,
            "canonical_size": canonical_size,
            "aligned": int(aligned),
            "inclusive": int(inclusive),
        },
        dtype=features[0].dtype,
        shape=(batch * count, features[0].shape[1], output_size, output_size),
        version=OPSET_VERSION,
    )
    return pooled.view(batch, count, *pooled.shape[1:])


def _top_k_node(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    k = min(k, values.shape[-1])
    shape = (*values.shape[:-1], k)
    lowest = values.new_full((), _LOWEST)
    largest, indices = symbolic_multi_out(
        "TopK",
        [torch.maximum(values, lowest), torch.full((1,), k, dtype=torch.int64)],
        {"axis": -1, "largest": 1, "sorted": 1},
        dtypes=[values.dtype, torch.int64],
        shapes=[shape, shape],
        version=OPSET,
    )
    return torch.where(largest == lowest, -torch.inf, largest), indices


# Replacement of each custom torch operation: a function that creates an ONNX node, or a function
# that uses only standard torch operations.
_NODES: dict[Any, Callable[..., Any]] = {
    torch.ops.maskrcnn.nms_keep.default: _nms_keep_node,
    torch.ops.maskrcnn.pyramid_roi_align.default: _pyramid_roi_align_node,
    torch.ops.maskrcnn.stable_top_k.default: _top_k_node,
    torch.ops.maskrcnn.top_k_of_parts.default: top_k_of_parts_in_torch,
    torch.ops.maskrcnn.decode_boxes.default: _decode_boxes_node,
    torch.ops.maskrcnn.grid_anchors.default: grid_anchors_in_torch,
}


@contextmanager
def _custom_operations_replaced() -> Iterator[None]:
    """Context manager: make the ONNX exporter translate custom torch operations.

    `_NODES` maps each operation to a function that replaces it by an ONNX node or by standard torch
    operations.
    """
    # The exporter applies this table of decompositions in any case, so entries in the table cost no
    # extra pass. `ExportedProgram.run_decompositions` would trace the whole model once more, which
    # takes a quarter of the export's time.
    table = torch._decomp.decomposition_table
    table.update(_NODES)
    try:
        yield
    finally:
        for operation in _NODES:
            del table[operation]


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Context manager: silence all Python warnings, and `torch.onnx` logs below level ERROR."""
    logger: Any = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with ignore_torch_warnings():
            yield
    finally:
        logger.setLevel(level)
