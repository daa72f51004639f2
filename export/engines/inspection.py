"""Inspection of a loaded engine: its tensors and layers."""

import importlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...model.bundle.manifest import EngineKind
from ...plugins.tensorrt.log import errors_of, shared_logger
from ..errors import EngineError
from .layers import Layer, dtype_from_text, layers_from_json


def load_engine(plan: Path, kind: EngineKind) -> tuple[Any, Any]:
    """Load an engine for inspection.

    Returns:
        the module `tensorrt` or `tensorrt_rtx`, and the `ICudaEngine`.

    Raises:
        ModuleNotFoundError: TensorRT or TensorRT-RTX is not installed.
        EngineError: the engine is damaged, or was built for another machine.
    """
    trt: Any = importlib.import_module(kind.replace("-", "_"))
    engine = None
    # TypeError: `trt.Runtime` cannot be created on a machine without a GPU.
    with errors_of(trt) as errors, suppress(TypeError):
        runtime = trt.Runtime(shared_logger(trt))
        runtime.engine_host_code_allowed = True  # version-compatible plans contain code
        engine = runtime.deserialize_cuda_engine(plan.read_bytes())
    if engine is None:
        reason = " ".join(errors[0].split()) if errors else "it gives no reason"
        if "cudaError" in reason:
            reason = f"it finds no GPU that it can use ({reason})"
        raise EngineError(
            f"{kind} {trt.__version__} cannot load {plan} on this machine: {reason}; "
            "inspect the engine on the machine that runs it, or rebuild it with `maskrcnn export "
            "--engine`"
        )
    return trt, engine


@dataclass(frozen=True)
class EngineTensor:
    """Input or output tensor of an engine."""

    name: str
    is_input: bool
    dtype: str
    # Sizes of the axes. -1: dynamic size, for which each optimization profile has a range.
    shape: tuple[int, ...]
    # Smallest, best and largest shape for each optimization profile. Empty for outputs.
    profiles: tuple[tuple[tuple[int, ...], ...], ...]


def inspected_tensors(trt: Any, engine: Any) -> list[EngineTensor]:
    """Return the inputs and outputs of a loaded engine."""
    tensors = []
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        numbers = range(engine.num_optimization_profiles) if is_input else ()
        tensors.append(
            EngineTensor(
                name=name,
                is_input=is_input,
                dtype=dtype_from_text(engine.get_tensor_dtype(name).name),
                shape=tuple(engine.get_tensor_shape(name)),
                profiles=tuple(
                    tuple(tuple(shape) for shape in engine.get_tensor_profile_shape(name, number))
                    for number in numbers
                ),
            )
        )
    return tensors


def context_of(trt: Any, engine: Any, *strategy: Any) -> Any:
    """Create an `IExecutionContext` of a loaded engine.

    Args:
        trt: the module `tensorrt` or `tensorrt_rtx`.
        engine: an `ICudaEngine`.
        strategy: an `ExecutionContextAllocationStrategy`, or nothing for TensorRT's default.

    Raises:
        EngineError: TensorRT cannot create the context, for example because the engine has no
            weights.
    """
    with errors_of(trt) as errors:
        context = engine.create_execution_context(*strategy)
    if context is None:
        reason = errors[0] if errors else "it gives no reason"
        raise EngineError(
            f"TensorRT cannot prepare the engine for execution: {reason}; if the engine was built "
            "with --strip-weights, first run `maskrcnn engine refit`"
        )
    return context


def inspected_layers(trt: Any, engine: Any) -> list[Layer]:
    """Return the layers of a loaded engine.

    Args:
        trt: the module `tensorrt` or `tensorrt_rtx`.
        engine: an `ICudaEngine`.

    Raises:
        EngineError: the engine has no weights, or was built without detailed profiling verbosity.
    """
    # The inspector reports formats only if all shapes are known, so set the input shapes in a
    # context. With USER_MANAGED, the context allocates no GPU memory.
    context = context_of(trt, engine, trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    for tensor in inspected_tensors(trt, engine):
        if tensor.is_input:
            _, best, _ = tensor.profiles[0]
            context.set_input_shape(tensor.name, best)
    inspector = engine.create_engine_inspector()
    inspector.execution_context = context
    return layers_from_json(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
