"""Functions captured in a CUDA graph."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def replayed(
    function: Callable[..., Sequence[Tensor]], example: Sequence[Tensor], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """What a function captured on an example answers when it is replayed on other inputs.

    Args:
        function: takes and returns tensors on the GPU.
        example: inputs while it is captured.
        inputs: of the same shapes.
    """
    held = [tensor.cuda() for tensor in example]
    warm_up = torch.cuda.Stream()
    with torch.cuda.stream(warm_up):
        function(*held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function(*held)
    for place, tensor in zip(held, inputs, strict=True):
        place.copy_(tensor)
    graph.replay()
    return [output.cpu() for output in outputs]
