from itertools import chain

import pytest
import torch
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList

from maskrcnn_trt.model.anchors import cell_anchors, grid_steps
from maskrcnn_trt.model.config.schema import AnchorConfig
from maskrcnn_trt.plugins.grid_anchors import grid_anchors

CONFIGS = {
    "default": AnchorConfig(),
    "other sizes and ratios": AnchorConfig(
        sizes=(10, 25, 50, 101, 333), aspect_ratios=(0.3, 0.5, 1.0, 3.0)
    ),
    "one ratio": AnchorConfig(aspect_ratios=(1.0,)),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("size", [(128, 192), (224, 160), (32, 96)])
def test_anchors_equal_torchvision(config: AnchorConfig, size: tuple[int, int]) -> None:
    generator = AnchorGenerator(
        tuple((s,) for s in config.sizes), (config.aspect_ratios,) * len(config.sizes)
    )
    grids = [(-(-size[0] // stride), -(-size[1] // stride)) for stride in (4, 8, 16, 32, 64)]
    images = ImageList(torch.zeros(1, 3, *size), [size])
    (expected,) = generator(images, [torch.zeros(1, 1, *grid) for grid in grids])
    strides = (4, 8, 16, 32, 64)
    steps = grid_steps(config, strides, size, grids)
    cells = cell_anchors(config, strides)
    anchors = grid_anchors(cells, list(chain(*steps)), list(chain(*grids)))
    assert torch.equal(anchors, expected)
