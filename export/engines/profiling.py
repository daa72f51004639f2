"""Measurement of the GPU time of each layer of an engine."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...model.bundle.spec import INPUT_NAMES
from ...plugins.tensorrt.log import errors_of
from ..errors import EngineError
from .inspection import EngineTensor, context_of, inspected_tensors

# Warm-up runs before the measurement, in which libraries load their code and GPU clocks rise.
_WARM_UP = 5


def profile_layers(trt: Any, engine: Any, batch: int, runs: int) -> dict[str, float]:
    """Run an engine on batches of noise, and measure the GPU time of each layer.

    Args:
        trt: the module `tensorrt` or `tensorrt_rtx`.
        engine: an `ICudaEngine`.
        batch: images per batch.
        runs: number of measured batches.

    Returns:
        Mean milliseconds per batch by the name of the layer, in execution order.

    Raises:
        EngineError: the engine does not support this batch size or has no weights, or the runtime
            fails.
    """
    tensors = inspected_tensors(trt, engine)
    number = _profile_for(tensors, batch)
    context = context_of(trt, engine)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def check(call: Callable[..., bool], *arguments: Any) -> None:
        with errors_of(trt) as errors:
            if not call(*arguments):
                reason = errors[0] if errors else "no error was logged"
                raise EngineError(f"TensorRT failed to profile the engine: {reason}")

    check(context.set_optimization_profile_async, number, stream.cuda_stream)
    for tensor in tensors:
        if tensor.is_input:
            check(context.set_input_shape, tensor.name, (batch, *tensor.shape[1:]))
    memory = _inputs_and_outputs(trt, engine, tensors, batch)
    for name, content in memory.items():
        check(context.set_tensor_address, name, content.data_ptr())
    torch.cuda.synchronize()
    times: defaultdict[str, float] = defaultdict(float)
    profiler = _layer_profiler(trt, times)  # the context does not keep it alive
    for run in range(_WARM_UP + runs):
        if run == _WARM_UP:
            context.profiler = profiler
        check(context.execute_async_v3, stream.cuda_stream)
    stream.synchronize()
    return {name: total / runs for name, total in times.items()}


def _profile_for(tensors: list[EngineTensor], batch: int) -> int:
    """Return the index of the first optimization profile whose range includes a batch size.

    Raises:
        EngineError: no profile includes the batch size.
    """
    profiles = next(tensor.profiles for tensor in tensors if tensor.name == INPUT_NAMES[0])
    ranges = [(smallest[0], largest[0]) for smallest, _, largest in profiles]
    for number, (smallest, largest) in enumerate(ranges):
        if smallest <= batch <= largest:
            return number
    allowed = ", ".join(f"{smallest} to {largest}" for smallest, largest in ranges)
    raise EngineError(
        f"the engine supports batches of {allowed} images, not of {batch}; choose another batch "
        "size"
    )


def _inputs_and_outputs(
    trt: Any, engine: Any, tensors: list[EngineTensor], batch: int
) -> dict[str, Tensor]:
    """Return a GPU tensor for each input and output of an engine, by name. Images are noise."""
    memory = {}
    for tensor in tensors:
        dtype = trt.nptype(engine.get_tensor_dtype(tensor.name))
        array = np.zeros((batch, *tensor.shape[1:]), dtype)
        memory[tensor.name] = torch.from_numpy(array).cuda()
    images, sizes = (memory[name] for name in INPUT_NAMES)
    images.copy_(torch.randint(0, 256, images.shape))
    sizes.copy_(torch.tensor(images.shape[2:]).expand(batch, 2))
    return memory


def _layer_profiler(trt: Any, times: defaultdict[str, float]) -> Any:
    """Return a `trt.IProfiler` that adds the milliseconds of each layer to `times[name]`."""

    class Profiler(trt.IProfiler):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            times[layer_name] += ms

    return Profiler()
