from pathlib import Path

import pytest
import torch

from maskrcnn_trt.model.bundle.manifest import Category, Preprocessing
from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.model.checkpoint import Checkpoint, save_checkpoint
from maskrcnn_trt.model.config.schema import ModelConfig
from maskrcnn_trt.model.mask_rcnn import MaskRCNN


@pytest.fixture(scope="session")
def true_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """R-50-FPN with random weights, for inputs of 800x1344."""
    torch.manual_seed(0)
    config = ModelConfig(num_classes=80)
    path = tmp_path_factory.mktemp("checkpoint") / "r50-fpn.pth"
    save_checkpoint(
        path,
        Checkpoint(
            model_config=config,
            weights=MaskRCNN(config).state_dict(),
            categories=tuple(Category(id=n, name=f"class {n}") for n in range(1, 81)),
            preprocessing=Preprocessing(
                min_size=800,
                max_size=1333,
                pixel_mean=config.pixel_mean,
                pixel_std=config.pixel_std,
            ),
            buckets=(ShapeBucket(800, 1344),),
            iteration=0,
        ),
    )
    return path
