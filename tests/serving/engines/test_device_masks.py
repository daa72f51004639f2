"""Boxes and COCO RLE computed on a device equal those of the CPU."""

import numpy as np
import pytest
import torch

from maskrcnn_trt.model.masks import rles_from_probabilities
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
    scales, limits = torch.from_numpy(scales_and_limits(SIZES, SOURCE_SIZES)).to(device)
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
@pytest.mark.parametrize("capacities", [(4000, 8000), (4000, 30), (20, 8000), (0, 0)])
@pytest.mark.parametrize(
    ("rows", "exceeding"),
    [([0, 1, 2, 3, 4], []), ([0, 1, 2, 3, 4], [1, 2, 4]), ([3, 1], []), ([], [])],
)
def test_rles_equal_those_of_the_cpu_at_any_capacity(
    device: str, capacities: tuple[int, int], rows: list[int], exceeding: list[int]
) -> None:
    _, masks = random_masks(device)
    on_device = encode_masks(masks, *capacities)
    on_host = EncodedMasks(*(tensor.cpu().numpy() for tensor in on_device))
    too_large = (on_host.num_runs > capacities[0]) | (on_host.lengths > capacities[1])
    assert too_large.any() == (capacities != (4000, 8000))
    on_host.num_runs[:, exceeding] = np.maximum(on_host.num_runs[:, exceeding], capacities[0] + 1)
    chosen = np.array(rows, np.intp)
    found, repeated = selected_rles(masks, on_host, capacities[0], [chosen, chosen[::-1]])
    too_large = (on_host.num_runs > capacities[0]) | (on_host.lengths > capacities[1])
    assert repeated == np.count_nonzero(too_large[:, chosen])
    for image, (height, width) in enumerate(SOURCE_SIZES):
        expected = rles_from_probabilities(
            masks.probabilities[image].cpu().numpy()[chosen],
            masks.boxes[image].cpu().numpy()[chosen],
            height,
            width,
        )
        counts = found[image][::-1] if image else found[image]
        assert counts == [rle.counts for rle in expected]
