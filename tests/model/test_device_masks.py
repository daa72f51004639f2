"""COCO RLE computed on a device equals that of the CPU."""

import numpy as np
import pytest
import torch

from maskrcnn_trt.model import device_masks
from maskrcnn_trt.model.device_masks import (
    EncodedMasks,
    MaskBatch,
    encode_masks,
    selected_rles,
    text_capacity,
)
from maskrcnn_trt.model.masks import rles_from_probabilities

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SOURCE_SIZES = np.array([[480, 640], [333, 500]])


def random_masks(device: str) -> MaskBatch:
    """Return the masks of random boxes [2, 5, 4], some of which touch the image's edge."""
    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(2, 5, 2, 2, generator=generator) * 1.2 - 0.1
    limits = torch.from_numpy(SOURCE_SIZES).flip(1).repeat(1, 2)[:, None]
    boxes = torch.cat([corners.amin(2), corners.amax(2)], dim=-1).clamp(0, 1) * limits
    probabilities = torch.rand(2, 5, 14, 14, generator=generator)
    source_sizes = torch.from_numpy(SOURCE_SIZES).to(device)
    return MaskBatch(probabilities.to(device), boxes.to(device), source_sizes, "torchvision")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("run_capacity", [4000, 20, 0])
@pytest.mark.parametrize("capacity", [80_000, 300, 0])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [3, 1], []])
def test_rles_equal_those_of_the_cpu_at_any_capacity(
    device: str,
    run_capacity: int,
    capacity: int,
    rows: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masks = random_masks(device)
    on_device = encode_masks(masks, run_capacity, capacity)
    on_host = EncodedMasks(*(tensor.cpu().numpy() for tensor in on_device))
    if (run_capacity, capacity) == (4000, 80_000):  # larger than necessary
        monkeypatch.delattr(device_masks, "_encode_exactly")
    chosen = np.array(rows, np.intp)
    both = selected_rles(masks, on_host, np.concatenate([chosen, chosen[::-1] + 5]))
    found = both[: len(rows)], both[len(rows) :]
    for image, (height, width) in enumerate(SOURCE_SIZES):
        expected = rles_from_probabilities(
            masks.probabilities[image].cpu().numpy()[chosen],
            masks.boxes[image].cpu().numpy()[chosen],
            height,
            width,
        )
        counts = found[image][::-1] if image else found[image]
        assert counts == [rle.counts for rle in expected]


def test_capacity_of_images_with_millions_of_columns_is_limited() -> None:
    assert text_capacity([640, 3000], depth=100) == 100 * (4096 + 6000)
    assert text_capacity([8_000_000] * 8, depth=1000) == text_capacity([8_000_000], depth=100)


@pytest.mark.parametrize("device", DEVICES)
def test_masks_are_encoded_again_in_parts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = random_masks(device)
    encodings = []
    # The masks have up to 2,509 runs: all at once, parts of 3, 3, 3 and 1 masks, and of one.
    for run_capacity, most in ((4000, 1 << 24), (0, 1 << 24), (0, 8000), (0, 1)):
        monkeypatch.setattr(device_masks, "_REPEATED_RUNS", most)
        encoded = encode_masks(masks, run_capacity, 80_000)
        on_host = EncodedMasks(*(tensor.cpu().numpy() for tensor in encoded))
        encodings.append(selected_rles(masks, on_host, np.arange(10)))
    assert all(own == encodings[0] for own in encodings)
