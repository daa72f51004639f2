"""What an engine says of itself where it can be loaded."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..model.manifest import EngineKind
from ..plugins.tensorrt_log import errors_of, shared_logger
from .engine_layers import Layer, dtype_from_text, layers_from_json
from .errors import EngineError


def load_engine(plan: Path, kind: EngineKind) -> tuple[Any, Any]:
    """Load an engine, as far as can be without running it.

    Returns:
        the module `tensorrt` or `tensorrt_rtx`, and the `ICudaEngine`.

    Raises:
        ModuleNotFoundError: TensorRT or TensorRT-RTX is not installed.
        EngineError: the engine is not for this machine, or damaged.
    """
    trt: Any = importlib.import_module(kind.replace("-", "_"))
    with errors_of(trt) as errors:
        engine = trt.Runtime(shared_logger(trt)).deserialize_cuda_engine(plan.read_bytes())
    if engine is None:
        reason = " ".join(errors[0].split()) if errors else "it gives no reason"
        raise EngineError(
            f"{kind} {trt.__version__} cannot load {plan} on this machine: {reason}; "
            "inspect it where it is to run, or build it again with `maskrcnn export --engine`"
        )
    return trt, engine


@dataclass(frozen=True)
class EngineTensor:
    """An input or output of an engine."""

    name: str
    is_input: bool
    dtype: str
    shape: tuple[int, ...]
    """-1 where the optimisation profile decides."""
    profiles: tuple[tuple[tuple[int, ...], ...], ...]
    """Smallest, best and largest shape by optimisation profile; inputs alone have them."""


def inspected_tensors(trt: Any, engine: Any) -> list[EngineTensor]:
    """Inputs and outputs of an engine that is loaded."""
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


def inspected_layers(trt: Any, engine: Any) -> list[Layer]:
    """Layers of an engine that is loaded.

    Args:
        trt: the module `tensorrt` or `tensorrt_rtx`.
        engine: an `ICudaEngine`.

    Raises:
        EngineError: it was built without saying more than its layers' names.
    """
    # Where sizes are open, so are formats; a context fixes them, here without device memory.
    context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    for tensor in inspected_tensors(trt, engine):
        if tensor.is_input:
            _, best, _ = tensor.profiles[0]
            context.set_input_shape(tensor.name, best)
    inspector = engine.create_engine_inspector()
    inspector.execution_context = context
    return layers_from_json(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
