"""ONNX function bodies of the custom operations, in standard operators of opset 18.

A runtime without kernels for the nodes `maskrcnn::NmsKeep`, `maskrcnn::PyramidRoIAlign`,
`maskrcnn::SingleMapRoIAlign` and `maskrcnn::DecodeBoxes` inlines the bodies; a runtime with kernels
ignores them. The operations are specified in `plugins/nms_keep/operation.py`,
`plugins/pyramid_roi_align/operation.py` and `plugins/box_deltas/operation.py`.
"""

import onnx
from onnxscript import FLOAT, INT32, INT64, script
from onnxscript import opset18 as op
from onnxscript.values import Opset

from ...model.bundle.spec import OPSET_DOMAIN, OPSET_VERSION
from ...model.config.schema import ModelConfig
from ...plugins.box_deltas.kernel import MAX_LOG_SCALE
from .roi_align import (
    PyramidRoIAlign,
    PyramidRoIAlignAdaptive,
    RoIAlignOnMap,
    RoILevel,
    SingleMapRoIAlign,
)

_DOMAIN = Opset(OPSET_DOMAIN, OPSET_VERSION)


@script(_DOMAIN, default_opset=op)
def NmsKeep(  # noqa: N802
    boxes: FLOAT, classes: INT64, iou_threshold: float, max_keep: int
) -> INT32:
    """Greedy NMS per class in N sets of K boxes, by fixed-point iteration.

    Inputs are boxes [N, K, 4] (xyxy), in descending order of score within each set, and classes
    [N, K], negative for padding. The output is a mask [N, K] int32: 1 for each kept box, else 0.
    Each iteration compares a box with the earlier boxes of the same set and class that the previous
    iteration kept. The box is kept if no IoU exceeds `iou_threshold`. The loop ends when the mask
    no longer changes. At most `max_keep` boxes of each set are kept, or any number if `max_keep` is
    0.
    """
    x1, y1, x2, y2 = op.Split(boxes, num_outputs=4, axis=2)
    area = (x2 - x1) * (y2 - y1)
    zero = op.Constant(value_float=0.0)
    width = op.Max(op.Min(x2, op.Transpose(x2, perm=[0, 2, 1]))
                   - op.Max(x1, op.Transpose(x1, perm=[0, 2, 1])), zero)  # fmt: skip
    height = op.Max(op.Min(y2, op.Transpose(y2, perm=[0, 2, 1]))
                    - op.Max(y1, op.Transpose(y1, perm=[0, 2, 1])), zero)  # fmt: skip
    intersection = width * height
    iou = intersection / (area + op.Transpose(area, perm=[0, 2, 1]) - intersection)
    column = op.Unsqueeze(classes, op.Constant(value_ints=[2]))
    row = op.Unsqueeze(classes, op.Constant(value_ints=[1]))
    overlaps = op.And(iou > op.Constant(value_float=iou_threshold), column == row)
    earlier = op.Trilu(op.Cast(overlaps, to=1), op.Constant(value_int=1), upper=1)
    valid = classes >= op.Constant(value_int=0)
    keep = valid
    unsettled = op.Constant(value_int=1) > op.Constant(value_int=0)
    while unsettled:
        hits = op.MatMul(op.Unsqueeze(op.Cast(keep, to=1), op.Constant(value_ints=[1])), earlier)
        free = op.Squeeze(hits, op.Constant(value_ints=[1])) == zero
        renewed = op.And(valid, free)
        changes = op.ReduceSum(op.Cast(op.Xor(renewed, keep), to=1), keepdims=0)
        unsettled = changes > zero
        keep = op.Identity(renewed)
    limit = op.Constant(value_int=max_keep)
    ranks = op.CumSum(op.Cast(keep, to=7), op.Constant(value_int=1))
    stays = op.And(keep, op.Or(ranks <= limit, limit == op.Constant(value_int=0)))
    return op.Cast(stays, to=6)


@script(_DOMAIN, default_opset=op)
def DecodeBoxes(  # noqa: N802
    deltas: FLOAT,
    references: FLOAT,
    indices: INT64,
    image_sizes: INT64,
    center_weight: float,
    size_weight: float,
    inclusive: int,
) -> FLOAT:
    """Decode selected box deltas, and clip the boxes to their images.

    Args:
        deltas: [B, N, C, 4], C deltas (dx, dy, dw, dh) of each of N anchors or proposals.
        references: anchors or proposals [B, N, 4], or [1, N, 4] if all images share them; xyxy in
            input pixels.
        indices: [B, K], deltas to decode: n * C + c for delta c of reference n. Negative: padding.
        image_sizes: [B, 2], height and width in pixels.
        center_weight: factor by which dx and dy were multiplied in encoding.
        size_weight: factor by which dw and dh were multiplied in encoding.
        inclusive: 1 if boxes outside of their image are clipped to one pixel at its edge, 0 if they
            are clipped to zero area.

    Returns:
        Boxes [B, K, 4], xyxy in input pixels, zero for padding.
    """
    first = op.Constant(value_int=0)
    chosen = op.Max(indices, first)
    owners = op.Div(chosen, op.Shape(deltas, start=2, end=3))
    batch = op.Shape(deltas, start=0, end=1)
    rows = op.Concat(op.Shape(indices), op.Constant(value_ints=[4]), axis=0)
    last = op.Constant(value_ints=[2])
    by_class = op.Reshape(deltas, op.Constant(value_ints=[0, -1, 4]))
    shift_x, shift_y, scale_x, scale_y = op.Split(
        op.GatherElements(by_class, op.Expand(op.Unsqueeze(chosen, last), rows), axis=1),
        num_outputs=4, axis=2,
    )  # fmt: skip
    all_references = op.Expand(references, op.Concat(batch, op.Constant(value_ints=[1, 1]), axis=0))
    x1, y1, x2, y2 = op.Split(
        op.GatherElements(all_references, op.Expand(op.Unsqueeze(owners, last), rows), axis=1),
        num_outputs=4, axis=2,
    )  # fmt: skip
    half, zero = op.Constant(value_float=0.5), op.Constant(value_float=0.0)
    center_factor = op.Constant(value_float=center_weight)
    size_factor = op.Constant(value_float=size_weight)
    largest = op.Constant(value_float=MAX_LOG_SCALE)
    width, height = x2 - x1, y2 - y1
    center_x = shift_x / center_factor * width + (x1 + half * width)
    center_y = shift_y / center_factor * height + (y1 + half * height)
    half_width = half * op.Exp(op.Min(scale_x / size_factor, largest)) * width
    half_height = half * op.Exp(op.Min(scale_y / size_factor, largest)) * height
    end_y, end_x = op.Split(
        op.Unsqueeze(op.Cast(image_sizes, to=1), last), num_outputs=2, axis=1
    )  # fmt: skip
    least = op.Cast(op.Constant(value_int=inclusive), to=1)
    boxes = op.Concat(
        op.Min(op.Max(center_x - half_width, zero), end_x - least),
        op.Min(op.Max(center_y - half_height, zero), end_y - least),
        op.Min(op.Max(center_x + half_width, least), end_x),
        op.Min(op.Max(center_y + half_height, least), end_y),
        axis=2,
    )
    return op.Where(op.Unsqueeze(indices >= first, last), boxes, zero)


def functions_for(config: ModelConfig) -> list[onnx.FunctionProto]:
    """Return the function bodies of the custom nodes in a model of this configuration."""
    if config.backbone.features != "fpn":
        pooling = [SingleMapRoIAlign, RoIAlignOnMap]
    elif config.roi.sampling_ratio == 0:
        pooling = [PyramidRoIAlignAdaptive, RoIAlignOnMap, RoILevel]
    else:
        pooling = [PyramidRoIAlign, RoILevel]
    bodies = [function.to_function_proto() for function in (NmsKeep, *pooling, DecodeBoxes)]
    if PyramidRoIAlign in pooling:
        (average,) = (node for node in bodies[1].node if node.op_type == "AveragePool")
        for attribute in average.attribute:
            attribute.ints[:] = [config.roi.sampling_ratio] * 2
    if PyramidRoIAlignAdaptive in pooling:
        # A function body needs the name of its node, which is PyramidRoIAlign in both cases.
        bodies[1].name = PyramidRoIAlign.name
    return bodies
