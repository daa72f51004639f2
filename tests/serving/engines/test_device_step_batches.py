import numpy as np
import pytest
import torch

from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.model.image_decoding import ImageHeader
from maskrcnn_trt.serving.detections import DetectionOptions
from maskrcnn_trt.serving.engines.base import ImageRequest, PlannedImage
from maskrcnn_trt.serving.engines.device_batches import (
    boxes_in_sources,
    scales_and_limits,
    selections_of,
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_boxes_are_scaled_and_clipped(device: str) -> None:
    sizes, source_sizes = np.array([[[96, 128], [90, 120]], [[480, 640], [333, 500]]])
    corners = torch.rand(2, 5, 2, 2, generator=torch.Generator().manual_seed(0)) * 140 - 10
    boxes = torch.cat([corners.amin(2), corners.amax(2)], dim=-1)
    scales, limits = torch.from_numpy(scales_and_limits(sizes, source_sizes)[:, :, None]).to(device)
    found = boxes_in_sources(boxes.to(device), scales, limits).cpu().numpy()
    for own, source, (height, width), (source_height, source_width) in zip(
        boxes.numpy(), found, sizes, source_sizes, strict=True
    ):
        edges = np.array([source_width, source_height] * 2, np.float32)
        ratios = edges / np.array([width, height] * 2, np.float32)
        np.testing.assert_array_equal(source, np.clip(own * ratios, 0, edges))


def test_selections_are_floats() -> None:
    """The GPU reads them as float64."""
    image = PlannedImage(b"", ImageHeader((8, 8), 1, False), ShapeBucket(8, 8), (8, 8))
    options = [
        DetectionOptions(score_threshold=0, max_detections=5),
        DetectionOptions(score_threshold=1, max_detections=2**64),
        DetectionOptions(),
    ]
    for count in (1, 2, 3):
        selections = selections_of([ImageRequest(image, own) for own in options[:count]])
        assert selections.dtype == np.float64
    assert selections.tolist() == [[5, 0], [2**64, 1], [np.inf, 0]]
