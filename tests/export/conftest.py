from pathlib import Path

import pytest
import torch

from maskrcnn_trt.export.bundle import bundle_from_checkpoint
from maskrcnn_trt.model.checkpoint import Checkpoint, save_checkpoint
from maskrcnn_trt.model.config import ModelConfig
from maskrcnn_trt.model.manifest import Category, Preprocessing
from maskrcnn_trt.model.mask_rcnn import MaskRCNN
from maskrcnn_trt.model.spec import ShapeBucket


@pytest.fixture(scope="session")
def half_bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model exported as fp16 for inputs of 96x160."""
    path = tmp_path_factory.mktemp("bundles") / "half"
    bundle_from_checkpoint(
        tiny_checkpoint, path, precisions=("fp16",), buckets=(ShapeBucket(96, 160),)
    )
    return path


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
