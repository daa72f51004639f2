"""Stub of TensorRT's builder, which calls plugins in the order of the real one.

Only TensorRT's C++ side can create symbolic sizes. The stub passes numbers that pretend not to be
constants.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from maskrcnn_trt.plugins.runtime.compilation import Launch
from maskrcnn_trt.plugins.tensorrt.plugins import PLUGIN_NAMESPACE


def builder_of_plugin(
    trt: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, attributes: dict[str, Any]
) -> "Builder":
    """Return a stub builder for one plugin, created from int32 and float32 as by the parser."""

    class Size(trt.Dims):  # type: ignore[misc, name-defined]
        def __init__(self, value: int) -> None:
            super().__init__()
            self.value = value

        def is_constant(self) -> bool:
            return False

    expressions = import_module(import_module("tensorrt.plugin").SymInt32.__module__)

    class Expression(expressions.SymExprImpl):  # type: ignore[misc, name-defined]
        def __init__(self, expression: Any) -> None:
            super().__init__(expression)
            self.value = expression._expr.value

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
    """Scalars of a kernel, filled by the plugin."""

    nbSymExprs = 0  # noqa: N815


class Builder:
    """Stub builder for one plugin. Types are `tensorrt.DataType`; the first axis is dynamic."""

    def __init__(self, trt: ModuleType, size: type, plugin: Any) -> None:
        self._trt, self._size, self._plugin = trt, size, plugin

    def output(
        self, types: Sequence[Any], shapes: Sequence[tuple[int, ...]]
    ) -> tuple[Any, tuple[int, ...]]:
        """Return type and shape of the output for those of the inputs."""
        (output_type,) = self._plugin.get_output_data_types(list(types), [len(s) for s in shapes])
        exprs = [[self._size(side) for side in shape] for shape in shapes]
        (shape,) = self._plugin.get_output_shapes(exprs, [], self)
        return output_type, tuple(side.value for side in shape)

    def combinations(
        self, types: Sequence[Any], shapes: Sequence[tuple[int, ...]]
    ) -> set[tuple[tuple[Any, ...], tuple[str, ...]]]:
        """Return supported combinations of types and format names; the output comes last."""
        found = self._plugin.get_supported_format_combinations(
            self._tensors(types, shapes, ["LINEAR"] * len(types)), len(types) - 1
        )
        rows = [found[start : start + len(types)] for start in range(0, len(found), len(types))]
        return {(tuple(t.type for t in row), tuple(t.format.name for t in row)) for row in rows}

    def kernel(
        self, types: Sequence[Any], shapes: Sequence[tuple[int, ...]], formats: Sequence[str]
    ) -> tuple[str, bytes, Launch]:
        """Return name, PTX and launch of the kernel; arguments include the output, last."""
        tensors, inputs = self._tensors(types, shapes, formats), len(types) - 1
        self._plugin.configure_plugin(tensors[:inputs], tensors[inputs:])
        self._plugin.set_tactic(0)
        launch, scalars = SimpleNamespace(), _Scalars()
        self._plugin.get_launch_params(None, tensors, inputs, launch, scalars, self)
        descriptions = [tensor.desc for tensor in tensors]
        name, ptx = self._plugin.get_kernel(descriptions[:inputs], descriptions[inputs:])
        assert launch.shared_mem.value == 0
        grid = launch.grid_x.value, launch.grid_y.value, launch.grid_z.value
        block = launch.block_x.value, launch.block_y.value, launch.block_z.value
        values = tuple(scalars[index].value for index in range(scalars.nbSymExprs))
        return name, ptx, Launch(grid, block, values)

    def constant(self, value: int) -> Any:
        """Implement `IExprBuilder.constant`, which plugins call."""
        return self._size(value)

    def operation(self, operation: Any, first: Any, second: Any) -> Any:
        """Implement `IExprBuilder.operation`, which plugins call."""
        names = self._trt.DimensionOperation
        compute: dict[Any, Callable[[int, int], int]] = {
            names.SUM: lambda a, b: a + b,
            names.SUB: lambda a, b: a - b,
            names.PROD: lambda a, b: a * b,
            names.FLOOR_DIV: lambda a, b: a // b,
            names.CEIL_DIV: lambda a, b: -(-a // b),
        }
        return self._size(compute[operation](first.value, second.value))

    def _tensors(
        self, types: Sequence[Any], shapes: Sequence[tuple[int, ...]], formats: Sequence[str]
    ) -> list[Any]:
        tensors = []
        for type_, shape, name in zip(types, shapes, formats, strict=True):
            description, tensor = self._trt.PluginTensorDesc(), self._trt.DynamicPluginTensorDesc()
            description.dims, description.type = (-1, *shape[1:]), type_
            description.format, description.scale = getattr(self._trt.TensorFormat, name), 1.0
            tensor.desc = description
            tensors.append(tensor)
        return tensors
