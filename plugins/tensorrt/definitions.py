"""Definitions of the TensorRT plugins: inputs, attributes, types and formats, kernels and launches.

plugins/README.md describes the inputs and attributes. TensorRT is not imported here: functions that
need its Python module take it as the argument `trt`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..box_deltas.kernel import decode_boxes_kernel, decode_boxes_launch
from ..nms_keep.kernel import MAX_BOXES, nms_keep_kernel, nms_keep_launch
from ..pyramid_roi_align.kernel import Pooling, forward_kernel, pyramid_roi_align_launch
from ..runtime.compilation import Kernel, Launch

# Names of the kernels' feature types by TensorRT's names.
_FEATURE_TYPES = {"FLOAT": "float", "HALF": "float16", "BF16": "bfloat16"}

# Shape expression and data type of a tensor.
Description = tuple[tuple[Any, ...], Any]


class Plugin(NamedTuple):
    """Definition of a plugin with one output.

    `describe(trt, *inputs, **attributes)` returns the output's shape and data type.
    `implement(trt, *inputs, output=output, **attributes)` returns the kernel and its launch.
    `combinations(*inputs)` returns the supported data types and memory formats.
    """

    inputs: tuple[str, ...]
    # Python types by attribute name; `list`: several floats. TensorRT passes values in this order.
    attributes: Mapping[str, type]
    # Returns the supported pairs of types and formats of inputs and output. With alternatives
    # such as `FP32|FP16`, all tensors have the first type or all have the second.
    combinations: Callable[..., list[tuple[str, str]]]
    describe: Callable[..., Description]
    implement: Callable[..., tuple[Kernel, Launch]]


def _implement_keep(
    _trt: Any, boxes: Any, classes: Any, output: Any, iou_threshold: float, max_keep: int
) -> tuple[Kernel, Launch]:
    if classes.shape[1] > MAX_BOXES:
        raise ValueError(f"NmsKeep takes at most {MAX_BOXES} boxes per set, not {classes.shape[1]}")
    sets, count = classes.shape_expr
    return nms_keep_kernel(iou_threshold, max_keep, "int"), nms_keep_launch(sets, count)


def _implement_decoded(
    _trt: Any,
    deltas: Any,
    references: Any,
    indices: Any,
    _image_sizes: Any,
    output: Any,
    center_weight: float,
    size_weight: float,
    inclusive: int,
) -> tuple[Kernel, Launch]:
    batch, count, classes, _ = deltas.shape_expr
    _, chosen = indices.shape_expr
    kernel = decode_boxes_kernel(center_weight, size_weight, None, inclusive=bool(inclusive))
    shared = references.shape[0] == 1
    return kernel, decode_boxes_launch(batch, count, classes, chosen, shared=shared)


def _describe_pooled(
    _trt: Any, *inputs: Any, output_size: int, spatial_scales: list[float], **_others: Any
) -> Description:
    *features, rois = inputs
    if len(spatial_scales) != len(features):
        raise ValueError(
            f"spatial_scales must have one value per feature map: {len(features)}, not "
            f"{len(spatial_scales)}"
        )
    batch, count, _ = rois.shape_expr
    channels = features[0].shape_expr[1]
    # Four axes, because TensorRT documents no channels-last formats for five.
    return (batch * count, channels, output_size, output_size), features[0].dtype


def _implement_pooled(
    trt: Any,
    *inputs: Any,
    output: Any,
    spatial_scales: list[float],
    aligned: int,
    inclusive: int,
    **attributes: Any,
) -> tuple[Kernel, Launch]:
    *features, rois = inputs
    if len(set(spatial_scales)) == 1:
        # In TensorRT 10.15 and older, all values of an array that the parser passes equal the first
        # one. Recompute the scales.
        spatial_scales = [spatial_scales[0] / 2**level for level in range(len(features))]
    pooling = Pooling(
        spatial_scales=tuple(spatial_scales),
        aligned=bool(aligned),
        inclusive=bool(inclusive),
        **attributes,
    )
    channels_last = (trt.TensorFormat.HWC, trt.TensorFormat.HWC8)
    kernel = forward_kernel(
        pooling,
        _FEATURE_TYPES[features[0].dtype.name],
        features[0].shape[1],
        channels_last=features[0].format in channels_last,
        pooled_channels_last=output.format in channels_last,
    )
    batch, count, _ = rois.shape_expr
    _, channels, *_ = features[0].shape_expr
    sizes = [(feature.shape_expr[2], feature.shape_expr[3]) for feature in features]
    return kernel, pyramid_roi_align_launch(batch, count, channels, sizes, pooling.output_size)


def _combine_pooled(*inputs: Any) -> list[tuple[str, str]]:
    *features, _rois = inputs
    levels = len(features)
    # Each choice: types of the maps, format of the maps, and format of the output. Channels-last
    # maps allow both output formats: a convolution reads the output channels-last, a fully
    # connected layer reads it as LINEAR. HWC8 pads channels to a multiple of eight.
    choices = [("FP32|FP16|BF16", "LINEAR", "LINEAR")]
    choices += [("FP32", "HWC", pooled) for pooled in ("LINEAR", "HWC")]
    if features[0].shape[1] % 8 == 0:
        choices += [("FP16|BF16", "HWC8", pooled) for pooled in ("LINEAR", "HWC8")]
    return [
        (
            ", ".join([*[types] * levels, "FP32", types]),
            ", ".join([*[maps] * levels, "LINEAR", pooled]),
        )
        for types, maps, pooled in choices
    ]


def _roi_align(levels: int) -> Plugin:
    return Plugin(
        inputs=(*(f"feature_{level}" for level in range(levels)), "rois"),
        attributes={
            "output_size": int,
            "sampling_ratio": int,
            "spatial_scales": list,
            "canonical_level": int,
            "canonical_size": float,
            "aligned": int,
            "inclusive": int,
        },
        combinations=_combine_pooled,
        describe=_describe_pooled,
        implement=_implement_pooled,
    )


PLUGINS = {
    "DecodeBoxes": Plugin(
        inputs=("deltas", "references", "indices", "image_sizes"),
        attributes={"center_weight": float, "size_weight": float, "inclusive": int},
        combinations=lambda *_inputs: [("FP32, FP32, INT64, INT64, FP32", "LINEAR")],
        describe=lambda _trt, deltas, _references, indices, *_rest, **_attributes: (
            (*indices.shape_expr, 4),
            deltas.dtype,
        ),
        implement=_implement_decoded,
    ),
    "NmsKeep": Plugin(
        inputs=("boxes", "classes"),
        attributes={"iou_threshold": float, "max_keep": int},
        combinations=lambda *_inputs: [("FP32, INT64, INT32", "LINEAR")],
        # The output is int32, because TensorRT plugins cannot output booleans.
        describe=lambda trt, _boxes, classes, **_rest: (tuple(classes.shape_expr), trt.int32),
        implement=_implement_keep,
    ),
    "PyramidRoIAlign": _roi_align(levels=4),
    "SingleMapRoIAlign": _roi_align(levels=1),
}
