"""ONNX function bodies of the custom operations, in standard operators of opset 18.

A runtime without kernels for `maskrcnn::NmsKeep` and `maskrcnn::PyramidRoIAlign` inlines the
bodies; a runtime with kernels ignores them. The contracts are in `plugins/nms_keep/operation.py`
and `plugins/pyramid_roi_align/operation.py`.
"""

import onnx
from onnxscript import FLOAT, INT32, INT64, script
from onnxscript import opset18 as op
from onnxscript.values import Opset

from ...model.bundle.spec import OPSET_DOMAIN, OPSET_VERSION
from ...model.config.schema import ModelConfig
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
    """Greedy NMS as a fixed-point iteration over the mask of kept boxes.

    boxes [N, K, 4] in descending order of score, classes [N, K], negative for padding -> keep
    [N, K] int32, 1 or 0. In each iteration a box is kept if no kept box before it suppresses it.
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


def functions_for(config: ModelConfig) -> list[onnx.FunctionProto]:
    """Return the function bodies of the custom nodes in a model of this configuration."""
    if config.backbone.features != "fpn":
        pooling = [SingleMapRoIAlign, RoIAlignOnMap]
    elif config.roi.sampling_ratio == 0:
        pooling = [PyramidRoIAlignAdaptive, RoIAlignOnMap, RoILevel]
    else:
        pooling = [PyramidRoIAlign, RoILevel]
    bodies = [function.to_function_proto() for function in (NmsKeep, *pooling)]
    if PyramidRoIAlign in pooling:
        (average,) = (node for node in bodies[1].node if node.op_type == "AveragePool")
        for attribute in average.attribute:
            attribute.ints[:] = [config.roi.sampling_ratio] * 2
    if PyramidRoIAlignAdaptive in pooling:
        # The adaptive body implements the node PyramidRoIAlign, too, so it gets the node's name.
        bodies[1].name = PyramidRoIAlign.name
    return bodies
