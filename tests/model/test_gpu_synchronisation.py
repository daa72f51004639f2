"""Detection and the gradients of a training step never synchronise with the GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from cuda_graphs import replayed
from small_models import ground_truth, noise_images, random_model, small_config

from maskrcnn_trt.model.mask_rcnn import BatchDetections
from maskrcnn_trt.model.targets import Targets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

FEATURES = ["fpn", "c4", "c5"]


@contextmanager
def synchronisation_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_synchronisation_is_detected() -> None:
    tensor = torch.ones(3, device="cuda")
    with synchronisation_is_an_error(), pytest.raises(RuntimeError, match="synchronizing CUDA"):
        tensor.sum().item()


@pytest.mark.parametrize("features", FEATURES)
@torch.inference_mode()
def test_captured_detection_replays_for_other_images(features: str) -> None:
    """Capturing a CUDA graph fails if anything synchronises."""
    model = random_model(small_config("resnet50", features, "frozen_bn")).eval().cuda()
    images, sizes = noise_images()
    example = images.flip(0), sizes.flip(0)
    expected = BatchDetections(*(part.cpu() for part in model(images.cuda(), sizes.cuda())))
    found = BatchDetections(*replayed(model, example, (images, sizes)))
    assert expected.num_detections.min() > 0
    assert not torch.equal(expected.boxes, expected.boxes.flip(0))
    assert torch.equal(found.num_detections, expected.num_detections)
    assert torch.equal(found.labels, expected.labels)
    torch.testing.assert_close(found.boxes, expected.boxes, atol=1e-2, rtol=0)
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.masks, expected.masks, atol=1e-3, rtol=0)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("features", FEATURES)
def test_training_step_does_not_synchronise(features: str, half: bool) -> None:
    model = random_model(small_config("resnet50", features, "frozen_bn")).train().cuda()
    images, sizes = (tensor.cuda() for tensor in noise_images())
    targets, seeds = Targets(*(part.cuda() for part in ground_truth())), torch.arange(2).cuda()

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            losses = model(images, sizes, targets, seeds).means()
        losses.sum().backward()

    # Loading kernels in the first step may synchronise.
    step()
    model.zero_grad()
    with synchronisation_is_an_error():
        step()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
