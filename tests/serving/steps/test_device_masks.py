"""Boxes and run lengths made on a device are those that the CPU makes."""

import numpy as np
import pytest
import torch

from maskrcnn_trt.model.masks import rles_from_probabilities
from maskrcnn_trt.serving.steps.device_masks import (
    Masks,
    MaskStrings,
    boxes_in_sources,
    chosen_strings,
    scales_and_limits,
    strings_of_masks,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SIZES, SOURCE_SIZES = np.array([[[96, 128], [90, 120]], [[480, 640], [333, 500]]])


def drawn(device: str) -> tuple[torch.Tensor, Masks]:
    """Boxes [2, 5, 4] in resized images, some beyond the edge, and masks to paste."""
    generator = torch.Generator().manual_seed(0)
    corners = torch.rand(2, 5, 2, 2, generator=generator) * 140 - 10
    boxes = torch.cat([corners.amin(2), corners.amax(2)], dim=-1).to(device)
    source_sizes = torch.from_numpy(SOURCE_SIZES).to(device)
    scales, limits = torch.from_numpy(scales_and_limits(SIZES, SOURCE_SIZES)).to(device)
    probabilities = torch.rand(2, 5, 14, 14, generator=generator).to(device)
    in_sources = boxes_in_sources(boxes, scales, limits)
    return boxes, Masks(probabilities, in_sources, source_sizes, "torchvision")


@pytest.mark.parametrize("device", DEVICES)
def test_boxes_are_scaled_and_clipped(device: str) -> None:
    boxes, masks = drawn(device)
    for own, source, (height, width), (source_height, source_width) in zip(
        boxes.cpu().numpy(), masks.boxes.cpu().numpy(), SIZES, SOURCE_SIZES, strict=True
    ):
        limits = np.array([source_width, source_height] * 2, np.float32)
        ratios = limits / np.array([width, height] * 2, np.float32)
        np.testing.assert_array_equal(source, np.clip(own * ratios, 0, limits))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("room", [(4000, 8000), (4000, 30), (20, 8000), (0, 0)])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [3, 1], []])
@pytest.mark.parametrize("lost", [[], [1, 2, 4]])
def test_strings_are_those_of_the_cpu_path_with_little_room_too(
    device: str, room: tuple[int, int], rows: list[int], lost: list[int]
) -> None:
    _, masks = drawn(device)
    on_device = strings_of_masks(masks, *room)
    on_host = MaskStrings(*(tensor.cpu().numpy() for tensor in on_device))
    lacks_room = (on_host.num_runs > room[0]) | (on_host.lengths > room[1])
    assert lacks_room.any() == (room != (4000, 8000))
    on_host.num_runs[:, lost] = room[0] + 1
    chosen = np.array(rows, np.intp)
    for image, (height, width) in enumerate(SOURCE_SIZES):
        expected = rles_from_probabilities(
            masks.probabilities[image].cpu().numpy()[chosen],
            masks.boxes[image].cpu().numpy()[chosen],
            height,
            width,
        )
        strings = chosen_strings(masks, on_host, room[0], image, chosen)
        assert strings == [rle.counts for rle in expected]
