"""What the tests of several folders share: a tiny model with random weights, and its bundle."""

import importlib
from pathlib import Path

import pytest


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu") and not importlib.import_module("torch").cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a small model of three classes that finds something in any picture."""
    torch = pytest.importorskip("torch")
    from maskrcnn_trt.model.checkpoint import Checkpoint, save_checkpoint
    from maskrcnn_trt.model.config import (
        AnchorConfig,
        BackboneConfig,
        ModelConfig,
        RoiConfig,
        RpnConfig,
    )
    from maskrcnn_trt.model.manifest import Category, Preprocessing
    from maskrcnn_trt.model.mask_rcnn import MaskRCNN
    from maskrcnn_trt.model.spec import ShapeBucket

    torch.manual_seed(0)
    config = ModelConfig(
        num_classes=3,
        backbone=BackboneConfig(name="resnet18", norm="bn", frozen_stages=0, fpn_channels=32),
        anchors=AnchorConfig(sizes=(16, 32, 64, 128, 256)),
        rpn=RpnConfig(pre_nms_top_n_test=100, post_nms_top_n_test=50),
        roi=RoiConfig(
            box_head_dim=64,
            mask_head_dim=32,
            mask_head_depth=2,
            max_detections=20,
            nms_candidates=200,
            score_threshold=0.2,
        ),
    )
    path = tmp_path_factory.mktemp("checkpoint") / "tiny.pth"
    save_checkpoint(
        path,
        Checkpoint(
            model_config=config,
            weights=MaskRCNN(config).state_dict(),
            categories=tuple(
                Category(id=i, name=n) for i, n in ((3, "disc"), (7, "box"), (8, "ring"))
            ),
            preprocessing=Preprocessing(
                min_size=96,
                max_size=160,
                pixel_mean=config.pixel_mean,
                pixel_std=config.pixel_std,
            ),
            buckets=(ShapeBucket(96, 160), ShapeBucket(160, 96)),
            iteration=0,
        ),
    )
    return path


@pytest.fixture(scope="session")
def bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model exported as fp32 for inputs of 96x160 and 160x96."""
    from maskrcnn_trt.export.bundle import bundle_from_checkpoint

    path = tmp_path_factory.mktemp("bundles") / "tiny"
    bundle_from_checkpoint(tiny_checkpoint, path, precisions=("fp32",))
    return path


@pytest.fixture(scope="session")
def torch_bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as ONNX and as programs of torch, in fp32 for inputs of 96x160 and 160x96."""
    from maskrcnn_trt.export.bundle import bundle_from_checkpoint

    path = tmp_path_factory.mktemp("bundles") / "torch"
    bundle_from_checkpoint(tiny_checkpoint, path, precisions=("fp32",), with_programs=True)
    return path
