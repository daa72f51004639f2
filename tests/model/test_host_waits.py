"""Neither detection nor a training step's losses and gradients wait for the GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from bodies import ground_truth, pictures, random_model, small_config
from cuda_graphs import replayed

from maskrcnn_trt.model.mask_rcnn import Detections
from maskrcnn_trt.model.targets import Targets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

FEATURES = ["fpn", "c4", "c5"]


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_waiting_is_noticed() -> None:
    tensor = torch.ones(3, device="cuda")
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="called a synchronizing CUDA"):
        tensor.sum().item()


@pytest.mark.parametrize("features", FEATURES)
@torch.inference_mode()
def test_captured_detection_answers_for_other_images(features: str) -> None:
    """A graph cannot hold what waits: it could not be captured."""
    model = random_model(small_config("resnet50", features, "frozen_bn")).eval().cuda()
    images, sizes = pictures()
    example = images.flip(0), sizes.flip(0)
    expected = Detections(*(part.cpu() for part in model(images.cuda(), sizes.cuda())))
    found = Detections(*replayed(model, example, (images, sizes)))
    assert expected.num_detections.min() > 0
    assert not torch.equal(expected.boxes, expected.boxes.flip(0))
    assert torch.equal(found.num_detections, expected.num_detections)
    assert torch.equal(found.labels, expected.labels)
    torch.testing.assert_close(found.boxes, expected.boxes, atol=1e-2, rtol=0)
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.masks, expected.masks, atol=1e-3, rtol=0)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("features", FEATURES)
def test_losses_and_gradients_wait_for_nothing(features: str, half: bool) -> None:
    model = random_model(small_config("resnet50", features, "frozen_bn")).train().cuda()
    images, sizes = (tensor.cuda() for tensor in pictures())
    targets, seeds = Targets(*(part.cuda() for part in ground_truth())), torch.arange(2).cuda()

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            losses = model(images, sizes, targets, seeds).means()
        losses.sum().backward()

    # The first step loads kernels, which may wait.
    step()
    model.zero_grad()
    with waiting_is_an_error():
        step()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
