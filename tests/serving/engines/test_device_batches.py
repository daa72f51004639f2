import numpy as np
import pytest
import torch

from maskrcnn_trt.serving.engines.device_batches import boxes_in_sources, scales_and_limits


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
