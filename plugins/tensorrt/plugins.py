"""Registration of CUDA kernels as TensorRT plugins. `definitions.py` defines the plugins.

The plugins are TensorRT's "quickly deployable plugins" with an ahead-of-time implementation. A plan
(serialised engine) contains the PTX of each kernel, and its launch parameters as expressions of the
input sizes, so that the plan runs without this package. TensorRT is imported when the plugins are
registered.
"""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..box_deltas.kernel import decode_boxes_kernel
from ..nms_keep.kernel import nms_keep_kernel
from ..pyramid_roi_align.kernel import Pooling, forward_kernel
from ..runtime.compilation import (
    compile_kernel,
    newest_supported_architecture,
    ptx_version,
    unique_entry,
)
from .definitions import PLUGINS, Plugin

# Namespace of the plugins. ONNX nodes need it as their attribute `plugin_namespace`: without the
# attribute, TensorRT's parser silently uses the node's function body, whatever the parser's flags.
# The parser does not use the domain of a node as the namespace.
PLUGIN_NAMESPACE = "maskrcnn"

# The only version that quickly deployable plugins can have.
_VERSION = "1"

# Annotations of attributes by Python type. They are arrays, because with NumPy 2.4 or later,
# TensorRT 10 cannot read scalars. With NumPy 2.5 or later, it cannot read `NDArray` either.
_FLOATS = np.ndarray[Any, np.dtype[np.float32]]
_FIELDS = {int: np.ndarray[Any, np.dtype[np.int32]], float: _FLOATS, list: _FLOATS}

# Errors of the plugins' functions since the latest call of `plugin_errors`. TensorRT only prints
# them, and then fails without a reason.
_errors: list[str] = []


def register_plugins(architecture: int) -> dict[str, str]:
    """Register the plugins with TensorRT. A further call replaces their kernels.

    Args:
        architecture: ten times the compute capability of the oldest GPU that must run the kernels,
            such as 90 for 9.0. Newer GPUs can run them too.

    Returns:
        The version of each plugin. Keys are plugin names of the form `namespace::name`.

    Raises:
        ModuleNotFoundError: TensorRT is not installed.
    """
    trt, trtp = import_module("tensorrt"), import_module("tensorrt.plugin")
    for name, plugin in PLUGINS.items():
        plugin_id = f"{PLUGIN_NAMESPACE}::{name}"
        # A plugin can be registered only once per process, but its implementation several times.
        if not hasattr(getattr(trtp.op, PLUGIN_NAMESPACE, None), name):
            trtp.register(plugin_id)(_description(plugin, trt, trtp))
            trtp.autotune(plugin_id)(_combinations(plugin, trtp))
        trtp.aot_impl(plugin_id)(_implementation(plugin, trt, trtp, architecture))
    return {f"{PLUGIN_NAMESPACE}::{name}": _VERSION for name in PLUGINS}


def plugin_errors() -> list[str]:
    """Return the errors that the plugins have raised since the previous call of this function."""
    errors = _errors.copy()
    _errors.clear()
    return errors


def plugin_ptx_version(architecture: int) -> str:
    """Return the PTX language version, such as `9.0`, of the plugins' PTX for an architecture."""
    known = newest_supported_architecture(architecture)
    return ptx_version(compile_kernel(nms_keep_kernel(0.5, 0, "int"), known, "ptx"))


def kernels_digest(architecture: int) -> str:
    """Return a digest of the plugins' kernels: their sources, compiler options and architecture."""
    pooling = Pooling(7, 2, (0.25,), 4, 224.0, aligned=False, inclusive=False)
    pool = forward_kernel(pooling, "float", 1, channels_last=False, pooled_channels_last=False)
    decode = decode_boxes_kernel(1.0, 1.0, None, inclusive=False)
    kernels = (nms_keep_kernel(0.5, 0, "int"), pool, decode)
    names = [unique_entry(kernel, architecture) for kernel in kernels]
    return hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]


def _description(plugin: Plugin, trt: Any, trtp: Any) -> Callable[..., Any]:
    """Return a function for `tensorrt.plugin.register`.

    Given the plugin's inputs and attributes, the returned function describes the shape and data
    type of the plugin's output. `trt` is the module `tensorrt`, `trtp` is `tensorrt.plugin`.
    """

    def describe(*inputs: Any, **values: Any) -> Any:
        attributes = _attributes(plugin, [values[name] for name in plugin.attributes])
        return trtp.from_shape_expr(*plugin.describe(trt, *inputs, **attributes))

    inputs = dict.fromkeys(plugin.inputs, trtp.TensorDesc)
    attributes = {name: _FIELDS[kind] for name, kind in plugin.attributes.items()}
    return _signed(describe, {**inputs, **attributes}, trtp.TensorDesc)


def _combinations(plugin: Plugin, trtp: Any) -> Callable[..., Any]:
    """Return a function for `tensorrt.plugin.autotune`.

    Given the plugin's inputs and output, the returned function lists the supported combinations of
    data types and memory formats of these tensors. `trtp` is the module `tensorrt.plugin`.
    """

    def combine(*descriptions: Any) -> Any:
        *inputs, _outputs = descriptions
        return [trtp.AutoTuneCombination(*pair) for pair in plugin.combinations(*inputs)]

    parameters = dict.fromkeys((*plugin.inputs, "outputs"), inspect.Parameter.empty)
    return _signed(combine, parameters, list[trtp.AutoTuneCombination])


def _implementation(plugin: Plugin, trt: Any, trtp: Any, architecture: int) -> Callable[..., Any]:
    """Return a function for `tensorrt.plugin.aot_impl`.

    The returned function gives TensorRT the PTX of the plugin's kernel and the launch parameters.
    `trt` is the module `tensorrt`, `trtp` is `tensorrt.plugin`. `architecture` is ten times the
    compute capability of the oldest GPU that must run the kernel.
    """
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
        # A unique name, because a plan can hold kernels that differ only in their constants.
        entry = unique_entry(kernel, known)
        ptx = compile_kernel(kernel, known, "ptx", entry).rstrip(b"\0").decode()
        return entry, ptx, trtp.KernelLaunchParams(*launch.grid, *launch.block), scalars

    names = (*plugin.inputs, *plugin.attributes, "outputs", "tactic")
    returns = tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]
    return _signed(implement, dict.fromkeys(names, inspect.Parameter.empty), returns)


def _attributes(plugin: Plugin, values: Sequence[NDArray[Any]]) -> dict[str, Any]:
    """Return a plugin's attributes by name, converted from arrays to numbers and lists.

    `values` are in the order of `plugin.attributes`.
    """
    return {
        name: value.tolist() if kind is list else value.item()
        for (name, kind), value in zip(plugin.attributes.items(), values, strict=True)
    }


def _signed(
    function: Callable[..., Any], parameters: Mapping[str, Any], returns: Any
) -> Callable[..., Any]:
    """Wrap a function, and set the wrapper's signature, from which TensorRT reads names and types.

    If the function raises an exception, the exception is recorded for `plugin_errors` and raised
    again.

    Args:
        function: the function to wrap.
        parameters: annotations by parameter name.
        returns: annotation of the result.
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
