"""How kernels are launched: on which device, in which stream, and what is said where that fails."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from box_cases import random_boxes
from torch import Tensor

from maskrcnn_trt.plugins.box_iou import box_iou
from maskrcnn_trt.plugins.compilation import Kernel, KernelError, Launch
from maskrcnn_trt.plugins.kernels.nms_keep import nms_keep_kernel, nms_keep_launch
from maskrcnn_trt.plugins.launching import launch_kernel
from maskrcnn_trt.plugins.nms_keep import nms_keep

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

KERNEL = nms_keep_kernel(0.5, 0)


def one_set(device: str = "cuda") -> tuple[Tensor, Tensor]:
    """Boxes and classes of a set of 500, and so a kernel of many tiles."""
    return random_boxes(1, 500).to(device), torch.zeros(1, 500, dtype=torch.int64, device=device)


def expected_keep() -> Tensor:
    return nms_keep(*one_set("cpu"), 0.5, 0)


def test_a_launch_is_queued_in_the_current_stream() -> None:
    """The boxes arrive late in that stream: elsewhere, a launch would overtake them."""
    boxes, classes = one_set()
    late = torch.zeros_like(boxes)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # Loads the kernel, and reserves memory, which may wait.
        nms_keep(late, classes, 0.5, 0)
        torch.cuda._sleep(500_000_000)
        late.copy_(boxes)
        keep = nms_keep(late, classes, 0.5, 0)
        assert not stream.query(), "the launch has waited"
    stream.synchronize()
    assert torch.equal(keep.cpu(), expected_keep())


@two_gpus
def test_the_device_is_that_of_the_tensors() -> None:
    with torch.cuda.device(0):
        keep = nms_keep(*one_set("cuda:1"), 0.5, 0)
        assert torch.cuda.current_device() == 0
    assert keep.device == torch.device("cuda:1")
    assert torch.equal(keep.cpu(), expected_keep())


@two_gpus
def test_tensors_of_two_gpus_are_refused() -> None:
    boxes = random_boxes(1, 5)
    with pytest.raises(ValueError, match="takes tensors of one device, not of cuda:0, cuda:1"):
        box_iou(boxes.to("cuda:0"), boxes.to("cuda:1"))


def test_tensors_of_cpu_and_gpu_are_refused() -> None:
    boxes = random_boxes(1, 5)
    with pytest.raises(ValueError, match="box_iou takes tensors of one device, not of cpu, cuda"):
        box_iou(boxes.to("cuda:0"), boxes)


def test_a_thread_that_has_not_used_the_gpu_can_launch() -> None:
    boxes, classes = one_set()
    with ThreadPoolExecutor(1) as pool:
        keep = pool.submit(nms_keep, boxes, classes, 0.5, 0).result()
    assert torch.equal(keep.cpu(), expected_keep())


def test_an_empty_grid_does_nothing() -> None:
    # Not even compile: there is no such source.
    launch_kernel(Kernel("missing.cu", "missing"), Launch((0, 1, 1), (1, 1, 1)), [], [])


def test_what_the_driver_refuses_is_said() -> None:
    boxes, classes = one_set()
    keep = torch.empty(1, 500, dtype=torch.bool, device="cuda")
    launch = nms_keep_launch(1, 500)._replace(block=(2048, 1, 1))
    with pytest.raises(KernelError, match=r"nms_keep cannot be launched as .*2048.*: invalid"):
        launch_kernel(KERNEL, launch, [boxes, classes], [keep])
    launch_kernel(KERNEL, nms_keep_launch(1, 500), [boxes, classes], [keep])
    assert torch.equal(keep.cpu(), expected_keep())


def test_a_kernel_that_its_source_lacks_is_named() -> None:
    keep = torch.empty(1, 500, dtype=torch.bool, device="cuda")
    misnamed = Kernel(KERNEL.source, "nms_drop", KERNEL.constants)
    with pytest.raises(KernelError, match=r"nms_drop cannot be loaded on cuda:0: .*not found"):
        launch_kernel(misnamed, nms_keep_launch(1, 500), one_set(), [keep])


def captured(function: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Work of torch's own, as it warns of graphs without any.
        torch.zeros(1, device="cuda").add_(1)
        result = function()
    return graph, result


def test_the_first_use_of_a_kernel_cannot_be_captured() -> None:
    arguments = *one_set(), 0.4321, 0
    with pytest.raises(KernelError, match="run once on cuda:0 what is to be captured"):
        captured(lambda: nms_keep(*arguments))
    expected = nms_keep(*arguments)
    graph, keep = captured(lambda: nms_keep(*arguments))
    graph.replay()
    assert torch.equal(keep, expected)
