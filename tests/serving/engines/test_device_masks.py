"""Boxes and COCO RLE computed on a device equal those of the CPU."""

import numpy as np
import pytest
import torch

from maskrcnn_trt.model.masks import rles_from_probabilities
from maskrcnn_trt.serving.engines import device_batches
from maskrcnn_trt.serving.engines.device_batches import (
    EncodedMasks,
    MaskBatch,
    boxes_in_sources,
    encode_masks,
    scales_and_limits,
    selected_rles,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES, SOURCE_SIZES = np.array([[[96, 128], [90, 120]], [[480, 640], [333, 500]]])


def random_masks(device: str) -> tuple[torch.Tensor, MaskBatch]:
    """Return random boxes [2, 5, 4] in resized images, some beyond the edge, and their masks."""
    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(2, 5, 2, 2, generator=generator) * 140 - 10
    boxes = torch.cat([corners.amin(2), corners.amax(2)], dim=-1).to(device)
    source_sizes = torch.from_numpy(SOURCE_SIZES).to(device)
    scales, limits = torch.from_numpy(scales_and_limits(SIZES, SOURCE_SIZES)[:, :, None]).to(device)
    probabilities = torch.rand(2, 5, 14, 14, generator=generator).to(device)
    in_sources = boxes_in_sources(boxes, scales, limits)
    return boxes, MaskBatch(probabilities, in_sources, source_sizes, "torchvision")


@pytest.mark.parametrize("device", DEVICES)
def test_boxes_are_scaled_and_clipped(device: str) -> None:
    boxes, masks = random_masks(device)
    for own, source, (height, width), (source_height, source_width) in zip(
        boxes.cpu().numpy(), masks.boxes.cpu().numpy(), SIZES, SOURCE_SIZES, strict=True
    ):
        limits = np.array([source_width, source_height] * 2, np.float32)
        ratios = limits / np.array([width, height] * 2, np.float32)
        np.testing.assert_array_equal(source, np.clip(own * ratios, 0, limits))


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
    _, masks = random_masks(device)
    on_device = encode_masks(masks, run_capacity, capacity)
    on_host = EncodedMasks(*(tensor.cpu().numpy() for tensor in on_device))
    if (run_capacity, capacity) == (4000, 80_000):  # larger than necessary
        monkeypatch.delattr(device_batches, "encode_exactly")
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


@pytest.mark.parametrize("device", DEVICES)
def test_masks_are_encoded_again_in_parts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, masks = random_masks(device)
    encodings = []
    # The masks have up to 2,509 runs: all at once, parts of 3, 3, 3 and 1 masks, and of one.
    for run_capacity, most in ((4000, 1 << 24), (0, 1 << 24), (0, 8000), (0, 1)):
        monkeypatch.setattr(device_batches, "_REPEATED_RUNS", most)
        encoded = encode_masks(masks, run_capacity, 80_000)
        on_host = EncodedMasks(*(tensor.cpu().numpy() for tensor in encoded))
        encodings.append(selected_rles(masks, on_host, np.arange(10)))
    assert all(own == encodings[0] for own in encodings)
