"""CUDA graphs in which one memset zeroes the workspaces of cuDNN and cuBLASLt kernels.

Many of these kernels count their finished thread blocks in a workspace, which must be zero at the
start. Therefore, the libraries queue a memset before each such kernel. Each memset delays a CUDA
graph by several microseconds.
"""

import threading
from collections.abc import Callable
from itertools import product
from typing import Any, TypeVar

import torch
from cuda.bindings import driver
from torch import Tensor

from .launching import checked

_Result = TypeVar("_Result")

# Bytes that all small workspaces of a CUDA graph share, and maximum size of such a workspace.
# Larger workspaces hold more than counters.
_SHARED, _LARGEST = 1 << 20, 1 << 14
_ALIGNMENT = 256


class _SharedWorkspace(threading.local):
    """Per-thread memory for small cuDNN and cuBLASLt workspaces while a CUDA graph is captured."""

    # [`_SHARED`] uint8. None: the thread does not capture a graph.
    memory: Tensor | None = None
    # Number of bytes in use.
    used = 0


_shared = _SharedWorkspace()


def workspace(size: int, device: torch.device) -> Tensor:
    """Return a workspace [n] uint8 of at least `size` bytes for one call of cuDNN or cuBLASLt.

    The call must be queued in the current stream.
    """
    memory, begin, size = _shared.memory, _shared.used, max(1, size)
    if memory is None or memory.device != device or size > min(_LARGEST, _SHARED - begin):
        return torch.empty(size, dtype=torch.uint8, device=device)
    # Workspaces of one graph do not overlap, so that each is still zero when it is used.
    _shared.used += -(-size // _ALIGNMENT) * _ALIGNMENT
    return memory[begin : begin + size]


def captured_graph(
    function: Callable[[], _Result], pool: Any, device: torch.device
) -> tuple[torch.cuda.CUDAGraph, _Result]:
    """Capture a function as a CUDA graph. A replay zeroes all small workspaces by one memset.

    cuDNN and cuBLASLt queue one memset per workspace. The memsets of small workspaces are removed
    from the graph. A workspace is small if it has at most 16 KiB, and fits into the 1 MiB that the
    graph's small workspaces share.

    Args:
        function: function that queues work in the current stream. This work is captured.
        pool: result of `torch.cuda.graph_pool_handle`.
        device: GPU of the work.

    Returns:
        the graph, and the result of `function`. Each replay overwrites the result's tensors.

    Raises:
        KernelError: CUDA cannot remove the libraries' memsets from the graph.
    """
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        memory = torch.zeros(_SHARED, dtype=torch.uint8, device=device)
        _shared.memory, _shared.used = memory, 0
        try:
            result = function()
        finally:
            _shared.memory = None
    _remove_memsets(graph, memory)
    graph.instantiate()
    return graph, result


def _remove_memsets(graph: torch.cuda.CUDAGraph, memory: Tensor) -> None:
    """Remove the graph's memset nodes that zero a part of `memory`.

    The node that zeroes the whole memory stays.
    """
    handle = driver.CUgraph(graph.raw_cuda_graph())
    problem = "memsets cannot be removed from a CUDA graph"
    count = driver.cuGraphGetNodes(handle)[-1]
    for node in checked(driver.cuGraphGetNodes(handle, count), problem):
        kind = checked(driver.cuGraphNodeGetType(node), problem)
        if kind != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET:
            continue
        memset = checked(driver.cuGraphMemsetNodeGetParams(node), problem)
        first = int(memset.dst) - memory.data_ptr()
        size = memset.width * memset.elementSize
        is_part = first >= 0 and first + size <= len(memory) and size < len(memory)
        if not is_part or memset.height != 1 or memset.value != 0:
            continue
        sources, targets = (
            checked(function(node, function(node)[-1]), problem)
            for function in (driver.cuGraphNodeGetDependencies, driver.cuGraphNodeGetDependentNodes)
        )
        checked(driver.cuGraphDestroyNode(node), problem)
        for source, target in product(sources, targets):
            checked(driver.cuGraphAddDependencies(handle, [source], [target], None, 1), problem)
