"""CUDA kernels as TensorRT plugins. plugins/README.md lists their inputs and attributes.

The plugins are "quickly deployable plugins" with an ahead-of-time implementation. A plan contains
the PTX of each kernel, and its launch parameters as expressions of the input sizes, so that the
plan runs without this package. TensorRT is imported when the plugins are registered.
"""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..box_deltas.kernel import decode_boxes_kernel, decode_boxes_launch
from ..nms_keep.kernel import MAX_BOXES, nms_keep_kernel, nms_keep_launch
from ..pyramid_roi_align.kernel import Pooling, forward_kernel, pyramid_roi_align_launch
from ..runtime.compilation import (
    Kernel,
    Launch,
    compile_kernel,
    newest_supported_architecture,
    ptx_version,
    unique_entry,
)

# Namespace of the plugins. ONNX nodes need it as their attribute `plugin_namespace`: without the
# attribute, TensorRT's parser silently uses the node's function body, whatever the parser's flags.
# The parser does not use the domain of a node as the namespace.
PLUGIN_NAMESPACE = "maskrcnn"

# The only version that quickly deployable plugins can have.
_VERSION = "1"

# Annotations of attributes by Python type. They are arrays, because TensorRT 10 cannot read scalars
# with NumPy 2.4 or later, and not `NDArray`, which it cannot read with NumPy 2.5 or later.
_FLOATS = np.ndarray[Any, np.dtype[np.float32]]
_FIELDS = {int: np.ndarray[Any, np.dtype[np.int32]], float: _FLOATS, list: _FLOATS}

# Errors of the plugins' functions since the last call of `plugin_errors`. TensorRT only prints
# them, and then fails without a reason.
_errors: list[str] = []

# Names of the kernels' feature types by TensorRT's names.
_FEATURE_TYPES = {"FLOAT": "float", "HALF": "float16", "BF16": "bfloat16"}

# Shape expression and data type of a tensor.
Description = tuple[tuple[Any, ...], Any]


class _Plugin(NamedTuple):
    """Definition of a plugin with one output.

    `describe` returns the output's shape and data type, given the module `tensorrt`, the inputs and
    the attributes. `implement` returns the kernel and its launch, given these and the output.
    `combinations` returns the supported types and formats, given the inputs.
    """

    inputs: tuple[str, ...]
    # Python types by attribute name; `list`: several floats. TensorRT passes values in this order.
    attributes: Mapping[str, type]
    # Returns the supported pairs of types and formats of inputs and output. With alternatives
    # such as `FP32|FP16`, all tensors have the first type or all have the second.
    combinations: Callable[..., list[tuple[str, str]]]
    describe: Callable[..., Description]
    implement: Callable[..., tuple[Kernel, Launch]]


def register_plugins(architecture: int) -> dict[str, str]:
    """Register the plugins with TensorRT, or register them again for another GPU.

    Args:
        architecture: ten times the compute capability of the oldest GPU that must run the kernels,
            such as 90 for 9.0. Newer GPUs can run them too.

    Returns:
        Plugin versions by `namespace::name`.

    Raises:
        ModuleNotFoundError: TensorRT is not installed.
    """
    trt, trtp = import_module("tensorrt"), import_module("tensorrt.plugin")
    for name, plugin in _PLUGINS.items():
        plugin_id = f"{PLUGIN_NAMESPACE}::{name}"
        # A plugin can be registered only once per process, but its implementation several times.
        if not hasattr(getattr(trtp.op, PLUGIN_NAMESPACE, None), name):
            trtp.register(plugin_id)(_description(plugin, trt, trtp))
            trtp.autotune(plugin_id)(_combinations(plugin, trtp))
        trtp.aot_impl(plugin_id)(_implementation(plugin, trt, trtp, architecture))
    return {f"{PLUGIN_NAMESPACE}::{name}": _VERSION for name in _PLUGINS}


def plugin_errors() -> list[str]:
    """Return the errors that the plugins have raised within TensorRT since the last call."""
    errors = _errors.copy()
    _errors.clear()
    return errors


def plugin_ptx_version(architecture: int) -> str:
    """Return the PTX language version of the plugins for an architecture, such as `9.0`."""
    known = newest_supported_architecture(architecture)
    return ptx_version(compile_kernel(nms_keep_kernel(0.5, 0, "int"), known, "ptx"))


def kernels_digest(architecture: int) -> str:
    """Return a digest that changes with the kernels' sources, compiler options or architecture."""
    pooling = Pooling(7, 2, (0.25,), 4, 224.0, aligned=False, inclusive=False)
    pool = forward_kernel(pooling, "float", 1, channels_last=False, pooled_channels_last=False)
    decode = decode_boxes_kernel(1.0, 1.0, None, inclusive=False)
    kernels = (nms_keep_kernel(0.5, 0, "int"), pool, decode)
    names = [unique_entry(kernel, architecture) for kernel in kernels]
    return hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]


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
        raise ValueError(f"{len(features)} feature maps have {len(spatial_scales)} spatial_scales")
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
        # TensorRT 10.15 and older repeat the first value of an array from the parser: recompute it.
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
    # Types of the maps, and formats of the maps and of the output. The output has both formats,
    # because convolutions read channels-last and fully connected layers linear. HWC8 pads channels
    # to a multiple of eight.
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


def _roi_align(levels: int) -> _Plugin:
    return _Plugin(
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


_PLUGINS = {
    "DecodeBoxes": _Plugin(
        inputs=("deltas", "references", "indices", "image_sizes"),
        attributes={"center_weight": float, "size_weight": float, "inclusive": int},
        combinations=lambda *_inputs: [("FP32, FP32, INT64, INT64, FP32", "LINEAR")],
        describe=lambda _trt, deltas, _references, indices, *_rest, **_attributes: (
            (*indices.shape_expr, 4),
            deltas.dtype,
        ),
        implement=_implement_decoded,
    ),
    "NmsKeep": _Plugin(
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


def _description(plugin: _Plugin, trt: Any, trtp: Any) -> Callable[..., Any]:
    """Return the function for `tensorrt.plugin.register`, which describes the output tensor."""

    def describe(*inputs: Any, **values: Any) -> Any:
        attributes = _attributes(plugin, [values[name] for name in plugin.attributes])
        return trtp.from_shape_expr(*plugin.describe(trt, *inputs, **attributes))

    inputs = dict.fromkeys(plugin.inputs, trtp.TensorDesc)
    attributes = {name: _FIELDS[kind] for name, kind in plugin.attributes.items()}
    return _signed(describe, {**inputs, **attributes}, trtp.TensorDesc)


def _combinations(plugin: _Plugin, trtp: Any) -> Callable[..., Any]:
    """Return the function for `tensorrt.plugin.autotune`, which lists the supported formats."""

    def combine(*descriptions: Any) -> Any:
        *inputs, _outputs = descriptions
        return [trtp.AutoTuneCombination(*pair) for pair in plugin.combinations(*inputs)]

    parameters = dict.fromkeys((*plugin.inputs, "outputs"), inspect.Parameter.empty)
    return _signed(combine, parameters, list[trtp.AutoTuneCombination])


def _implementation(plugin: _Plugin, trt: Any, trtp: Any, architecture: int) -> Callable[..., Any]:
    """Return the function for `tensorrt.plugin.aot_impl`, which returns the kernel's PTX."""
    known = newest_supported_architecture(architecture)

    def implement(*arguments: Any) -> Any:
        *given, outputs, _tactic = arguments
        inputs, values = given[: len(plugin.inputs)], given[len(plugin.inputs) :]
        kernel, launch = plugin.implement(
            trt, *inputs, output=outputs[0], **_attributes(plugin, values)
        )
        scalars = trtp.SymIntExprs(len(launch.scalars))
        for index, scalar in enumerate(launch.scalars):
            # Arithmetic turns a size into a SymIntExpr, which lacks the bit width of SymInt32.
            scalars[index] = trtp.SymInt32(scalar)
        # Unique, because a plan can hold variants of a kernel that differ in their constants only.
        entry = unique_entry(kernel, known)
        ptx = compile_kernel(kernel, known, "ptx", entry).rstrip(b"\0").decode()
        return entry, ptx, trtp.KernelLaunchParams(*launch.grid, *launch.block), scalars

    names = (*plugin.inputs, *plugin.attributes, "outputs", "tactic")
    returns = tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]
    return _signed(implement, dict.fromkeys(names, inspect.Parameter.empty), returns)


def _attributes(plugin: _Plugin, values: Sequence[NDArray[Any]]) -> dict[str, Any]:
    """Convert attribute values to Python numbers and lists, by name."""
    return {
        name: value.tolist() if kind is list else value.item()
        for (name, kind), value in zip(plugin.attributes.items(), values, strict=True)
    }


def _signed(
    function: Callable[..., Any], parameters: Mapping[str, Any], returns: Any
) -> Callable[..., Any]:
    """Return the function with a signature, from which TensorRT reads names and types.

    Errors of the function are recorded, so that `plugin_errors` returns them, and raised again.
    """

    def recorded(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except Exception as error:
            _errors.append(str(error))
            raise

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    recorded.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind, annotation=type_) for name, type_ in parameters.items()],
        return_annotation=returns,
    )
    return recorded
