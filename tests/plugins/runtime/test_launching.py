"""Launch of kernels: GPU, stream and errors."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from box_cases import random_boxes
from torch import Tensor

from maskrcnn_trt.plugins.box_iou import box_iou
from maskrcnn_trt.plugins.nms_keep import nms_keep
from maskrcnn_trt.plugins.nms_keep.kernel import nms_keep_kernel, nms_keep_launch
from maskrcnn_trt.plugins.runtime.compilation import Kernel, KernelError, Launch
from maskrcnn_trt.plugins.runtime.launching import launch_kernel

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

KERNEL = nms_keep_kernel(0.5, 0)


def one_set(device: str = "cuda") -> tuple[Tensor, Tensor]:
    """Return boxes and classes of a set of 500, which the kernel splits into many tiles."""
    return random_boxes(1, 500).to(device), torch.zeros(1, 500, dtype=torch.int64, device=device)


def expected_keep() -> Tensor:
    return nms_keep(*one_set("cpu"), 0.5, 0)


def test_a_launch_is_queued_in_the_current_stream() -> None:
    """The boxes are written late in this stream; a launch in another stream would precede them."""
    boxes, classes = one_set()
    late = torch.zeros_like(boxes)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # Loading the kernel and allocating memory may synchronise.
        nms_keep(late, classes, 0.5, 0)
        torch.cuda._sleep(500_000_000)
        late.copy_(boxes)
        keep = nms_keep(late, classes, 0.5, 0)
        assert not stream.query(), "the launch has waited"
    stream.synchronize()
    assert torch.equal(keep.cpu(), expected_keep())


@two_gpus
def test_launch_uses_the_gpu_of_the_tensors() -> None:
    with torch.cuda.device(0):
        keep = nms_keep(*one_set("cuda:1"), 0.5, 0)
        assert torch.cuda.current_device() == 0
    assert keep.device == torch.device("cuda:1")
    assert torch.equal(keep.cpu(), expected_keep())


@pytest.mark.parametrize("other", ["cpu", pytest.param("cuda:1", marks=two_gpus)])
def test_tensors_of_two_devices_are_rejected(other: str) -> None:
    boxes = random_boxes(1, 5)
    with pytest.raises(ValueError, match="box_iou needs all its tensors on one device, not on c"):
        box_iou(boxes.to("cuda:0"), boxes.to(other))


def test_launch_from_a_new_thread() -> None:
    boxes, classes = one_set()
    with ThreadPoolExecutor(1) as pool:
        keep = pool.submit(nms_keep, boxes, classes, 0.5, 0).result()
    assert torch.equal(keep.cpu(), expected_keep())


def test_an_empty_grid_does_nothing() -> None:
    # The kernel is not even compiled: its source does not exist.
    launch_kernel(Kernel("missing.cu", "missing"), Launch((0, 1, 1), (1, 1, 1)), [], [])


def test_driver_errors_are_reported() -> None:
    boxes, classes = one_set()
    keep = torch.empty(1, 500, dtype=torch.bool, device="cuda")
    good = nms_keep_launch(1, 500)
    misnamed = Kernel(KERNEL.source, "nms_drop", KERNEL.constants)
    with pytest.raises(KernelError, match=r"nms_drop cannot be loaded on cuda:0: .*not found"):
        launch_kernel(misnamed, good, [boxes, classes], [keep])
    with pytest.raises(KernelError, match=r"nms_keep cannot be launched with .*2048.*: invalid"):
        launch_kernel(KERNEL, good._replace(block=(2048, 1, 1)), [boxes, classes], [keep])
    launch_kernel(KERNEL, good, [boxes, classes], [keep])
    assert torch.equal(keep.cpu(), expected_keep())


def captured(function: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # torch warns about graphs without any of its own kernels.
        torch.zeros(1, device="cuda").add_(1)
        result = function()
    return graph, result


def test_first_launch_cannot_be_captured() -> None:
    arguments = *one_set(), 0.4321, 0
    with pytest.raises(KernelError, match="once on cuda:0"):
        captured(lambda: nms_keep(*arguments))
    expected = nms_keep(*arguments)
    graph, keep = captured(lambda: nms_keep(*arguments))
    graph.replay()
    assert torch.equal(keep, expected)
