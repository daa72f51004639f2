"""Capture and replay of functions as CUDA graphs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def replayed(
    function: Callable[..., Sequence[Tensor]], example: Sequence[Tensor], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """Capture a function as a CUDA graph, and return its outputs for other inputs.

    Args:
        function: takes and returns tensors on the GPU.
        example: inputs of the capture.
        inputs: inputs of the replay, of the same shapes.
    """
    static_inputs = [tensor.cuda() for tensor in example]
    warm_up = torch.cuda.Stream()
    with torch.cuda.stream(warm_up):
        function(*static_inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function(*static_inputs)
    for static_input, tensor in zip(static_inputs, inputs, strict=True):
        static_input.copy_(tensor)
    graph.replay()
    return [output.cpu() for output in outputs]
