"""Stub of TensorRT's builder. It calls the methods of a plugin in the same order as TensorRT.

A symbolic size is an expression for the size of an axis. Only TensorRT's C++ code can create real
ones. The stub's symbolic sizes record the operations that a plugin applies to them, and can be
evaluated for any shapes of the inputs. Axes of size -1 are dynamic.
"""

import ctypes
import operator
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from maskrcnn_trt.plugins.runtime.compilation import Launch
from maskrcnn_trt.plugins.tensorrt.plugins import PLUGIN_NAMESPACE

Shape = tuple[int, ...]


def evaluated(sizes: Iterable[Any], shapes: Sequence[Shape]) -> tuple[int, ...]:
    """Return the values of symbolic sizes for the shapes of a plugin's inputs."""
    return tuple(size.evaluate(shapes) for size in sizes)


class PluginKernel(NamedTuple):
    """Kernel of a plugin, and its launch parameters as symbolic sizes."""

    entry: str
    ptx: bytes
    grid: tuple[Any, ...]
    block: tuple[Any, ...]
    scalars: tuple[Any, ...]
    # Integer type of `ctypes` for each scalar.
    scalar_types: tuple[Any, ...]

    def launch(self, shapes: Sequence[Shape]) -> Launch:
        """Return the launch parameters for the shapes of the inputs."""
        return Launch(
            *(evaluated(sizes, shapes) for sizes in (self.grid, self.block, self.scalars))
        )


def builder_of_plugin(
    trt: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, attributes: dict[str, Any]
) -> "Builder":
    """Return a stub builder for one plugin.

    The plugin is created as by TensorRT's ONNX parser, with int32 and float32 attributes.
    """

    # TensorRT's bindings accept only instances of their own classes, so derive from these.
    class Size(trt.Dims):  # type: ignore[misc, name-defined]
        def __init__(self, evaluate: Callable[[Sequence[Shape]], int], constant: bool) -> None:
            super().__init__()
            self.evaluate, self._constant = evaluate, constant

        def is_constant(self) -> bool:
            return self._constant

        def get_constant_value(self) -> int:
            assert self._constant
            return self.evaluate(())

    expressions = import_module(import_module("tensorrt.plugin").SymInt32.__module__)

    class Expression(expressions.SymExprImpl):  # type: ignore[misc, name-defined]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            self.__dict__[f"written_{name}"] = value  # the bindings have no getters

    monkeypatch.setattr(trt, "IDimensionExpr", Size)
    monkeypatch.setattr(trt, "DimsExprs", lambda length: [None] * length)
    monkeypatch.setattr(expressions, "SymExprImpl", Expression)
    return Builder(trt, Size, _plugin(trt, name, attributes))


def _plugin(trt: ModuleType, name: str, attributes: dict[str, Any]) -> Any:
    creator = trt.get_plugin_registry().get_creator(name, "1", PLUGIN_NAMESPACE)
    fields = []
    for declared in creator.field_names:
        value = np.atleast_1d(attributes[declared.name])
        if value.dtype.kind == "f":
            value, kind = value.astype(np.float32), trt.PluginFieldType.FLOAT32
        else:
            value, kind = value.astype(np.int32), trt.PluginFieldType.INT32
        fields.append(trt.PluginField(declared.name, value, kind))
    return creator.create_plugin(
        name,
        PLUGIN_NAMESPACE,
        trt.PluginFieldCollection(fields),
        trt.TensorRTPhase.BUILD,
        trt.QuickPluginCreationRequest.UNKNOWN,
    )


class _Scalars(dict[int, Any]):
    """Scalar arguments of a kernel, which the plugin sets."""

    nbSymExprs = 0  # noqa: N815


class Builder:
    """Stub builder for one plugin. Types are `tensorrt.DataType`."""

    def __init__(self, trt: ModuleType, size: type, plugin: Any) -> None:
        self._trt, self._size, self._plugin = trt, size, plugin

    def output(self, types: Sequence[Any], shapes: Sequence[Shape]) -> tuple[Any, tuple[Any, ...]]:
        """Return the output's type and symbolic sizes, for the types and shapes of the inputs."""
        (output_type,) = self._plugin.get_output_data_types(list(types), [len(s) for s in shapes])
        exprs = [
            [self._input_size(tensor, axis, side) for axis, side in enumerate(shape)]
            for tensor, shape in enumerate(shapes)
        ]
        (sizes,) = self._plugin.get_output_shapes(exprs, [], self)
        return output_type, tuple(sizes)

    def combinations(
        self, types: Sequence[Any], shapes: Sequence[tuple[int, ...]]
    ) -> set[tuple[tuple[Any, ...], tuple[str, ...]]]:
        """Return the supported combinations of types and of format names of all tensors.

        The output is the last tensor. `types` and `shapes` include it.
        """
        found = self._plugin.get_supported_format_combinations(
            self._tensors(types, shapes, ["LINEAR"] * len(types)), len(types) - 1
        )
        rows = [found[start : start + len(types)] for start in range(0, len(found), len(types))]
        return {(tuple(t.type for t in row), tuple(t.format.name for t in row)) for row in rows}

    def kernel(
        self, types: Sequence[Any], shapes: Sequence[Shape], formats: Sequence[str]
    ) -> PluginKernel:
        """Return the kernel for tensors of these types, shapes and formats, the output last."""
        tensors, inputs = self._tensors(types, shapes, formats), len(types) - 1
        self._plugin.configure_plugin(tensors[:inputs], tensors[inputs:])
        self._plugin.set_tactic(0)
        launch, scalars = SimpleNamespace(), _Scalars()
        self._plugin.get_launch_params(None, tensors, inputs, launch, scalars, self)
        descriptions = [tensor.desc for tensor in tensors]
        entry, ptx = self._plugin.get_kernel(descriptions[:inputs], descriptions[inputs:])
        assert launch.shared_mem.written_expr.get_constant_value() == 0
        grid, block = (
            tuple(getattr(launch, f"{name}_{axis}").written_expr for axis in "xyz")
            for name in ("grid", "block")
        )
        extra = [scalars[index] for index in range(scalars.nbSymExprs)]
        kinds = self._trt.PluginArgDataType
        widths = {
            kinds.INT8: ctypes.c_int8,
            kinds.INT16: ctypes.c_int16,
            kinds.INT32: ctypes.c_int32,
        }
        types = tuple(widths[scalar.written_dtype] for scalar in extra)
        return PluginKernel(entry, ptx, grid, block, tuple(s.written_expr for s in extra), types)

    def constant(self, value: int) -> Any:
        """Implement `IExprBuilder.constant`, which plugins call."""
        return self._size(lambda _shapes: value, True)

    def operation(self, operation: Any, first: Any, second: Any) -> Any:
        """Implement `IExprBuilder.operation`, which plugins call."""
        names = self._trt.DimensionOperation
        compute: Callable[[int, int], int] = {
            names.SUM: operator.add,
            names.SUB: operator.sub,
            names.PROD: operator.mul,
            names.FLOOR_DIV: operator.floordiv,
        }[operation]
        return self._size(
            lambda shapes: compute(first.evaluate(shapes), second.evaluate(shapes)),
            first.is_constant() and second.is_constant(),
        )

    def _input_size(self, tensor: int, axis: int, side: int) -> Any:
        if side >= 0:
            return self.constant(side)
        return self._size(lambda shapes: shapes[tensor][axis], False)

    def _tensors(
        self, types: Sequence[Any], shapes: Sequence[tuple[int, ...]], formats: Sequence[str]
    ) -> list[Any]:
        tensors = []
        for type_, shape, name in zip(types, shapes, formats, strict=True):
            description, tensor = self._trt.PluginTensorDesc(), self._trt.DynamicPluginTensorDesc()
            description.dims, description.type = shape, type_
            description.format, description.scale = getattr(self._trt.TensorFormat, name), 1.0
            tensor.desc = description
            tensors.append(tensor)
        return tensors
