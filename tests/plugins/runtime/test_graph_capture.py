import itertools

import pytest
import torch
from cuda.bindings import driver

from maskrcnn_trt.plugins.fused_convolution import cudnn_convolution, gemm_convolution
from maskrcnn_trt.plugins.runtime.graph_capture import captured_graph, workspace

DEVICE = torch.device("cuda", 0)


def memsets_in(graph: torch.cuda.CUDAGraph) -> int:
    handle = driver.CUgraph(graph.raw_cuda_graph())
    _, nodes, count = driver.cuGraphGetNodes(handle, driver.cuGraphGetNodes(handle)[2])
    kinds = [driver.cuGraphNodeGetType(node)[1] for node in nodes]
    assert len(kinds) == count
    return kinds.count(driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET)


@pytest.mark.gpu
def test_replays_equal_eager_calls_and_zero_workspaces_once() -> None:
    torch.manual_seed(0)
    images = torch.randn(8, 256, 64, 64, device=DEVICE).half()
    images = images.contiguous(memory_format=torch.channels_last)
    wide, narrow = (torch.randn(256, 256, side, side, device=DEVICE).half() for side in (3, 1))
    bias = torch.randn(256, device=DEVICE).half()

    def layers() -> list[torch.Tensor]:
        outputs = [images]
        for _ in range(3):
            same = [1, 1], [1, 1], [1, 1]
            hidden = cudnn_convolution(outputs[-1], wide / 48, bias, *same, True)
            outputs.append(gemm_convolution(hidden, narrow / 16, bias, outputs[-1], True))
        return outputs

    with torch.cuda.stream(torch.cuda.Stream()):
        layers()  # chooses the kernels
        graph, outputs = captured_graph(layers, torch.cuda.graph_pool_handle(), DEVICE)
        assert memsets_in(graph) <= 1
        for _ in range(3):
            images.normal_()
            graph.replay()
            for actual, expected in zip(outputs, layers(), strict=True):
                assert torch.equal(actual, expected)


@pytest.mark.gpu
def test_large_workspaces_are_not_shared() -> None:
    def sizes() -> list[int]:
        shared = [workspace(100, DEVICE), workspace(0, DEVICE), workspace(100, DEVICE)]
        large = workspace(1 << 20, DEVICE)
        ends = [(tensor.data_ptr(), tensor.data_ptr() + len(tensor)) for tensor in shared]
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
        assert shared[0].untyped_storage().data_ptr() != large.untyped_storage().data_ptr()
        return [len(tensor) for tensor in (*shared, large)]

    with torch.cuda.stream(torch.cuda.Stream()):
        _, found = captured_graph(sizes, torch.cuda.graph_pool_handle(), DEVICE)
    assert found == [100, 1, 100, 1 << 20]
    assert len(workspace(5, DEVICE)) == 5
