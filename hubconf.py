"""Models for `torch.hub.load(REPOSITORY, "maskrcnn_resnet50_fpn", weights=FILE)`.

The repository root is the package `maskrcnn_trt`. torch.hub keeps it in a folder of another name
and installs nothing, so the package is loaded from here.
"""

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .model.mask_rcnn import MaskRCNN

dependencies = ["numpy", "pydantic", "torch", "torchvision", "yaml"]


def _load_package() -> None:
    if "maskrcnn_trt" in sys.modules:
        return
    folder = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(
        "maskrcnn_trt", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["maskrcnn_trt"] = package
    spec.loader.exec_module(package)


def _build(name: str, features: str, weights: str | None, num_classes: int) -> "MaskRCNN":
    _load_package()
    from maskrcnn_trt.model.weights.models import build_model

    model: MaskRCNN = build_model(name, features, weights, num_classes)
    return model


def maskrcnn_resnet50_fpn(weights: str | None = None, num_classes: int = 80) -> "MaskRCNN":
    """Mask R-CNN on ResNet-50 with a feature pyramid, in evaluation mode.

    Args:
        weights: file or http(s) address of a checkpoint, or of weights of torchvision, detectron2,
            maskrcnn-benchmark or Caffe2; none, random weights. A backbone alone is no model.
        num_classes: foreground classes, where no weights say.
    """
    return _build("resnet50", "fpn", weights, num_classes)


def maskrcnn_resnet101_fpn(weights: str | None = None, num_classes: int = 80) -> "MaskRCNN":
    """Mask R-CNN on ResNet-101 with a pyramid; arguments as of `maskrcnn_resnet50_fpn`."""
    return _build("resnet101", "fpn", weights, num_classes)


def maskrcnn_resnet50_c4(weights: str | None = None, num_classes: int = 80) -> "MaskRCNN":
    """Mask R-CNN on ResNet-50's fourth stage; arguments as of `maskrcnn_resnet50_fpn`."""
    return _build("resnet50", "c4", weights, num_classes)


def maskrcnn_resnet101_c4(weights: str | None = None, num_classes: int = 80) -> "MaskRCNN":
    """Mask R-CNN on ResNet-101's fourth stage; arguments as of `maskrcnn_resnet50_fpn`."""
    return _build("resnet101", "c4", weights, num_classes)


def maskrcnn_resnet50_c5(weights: str | None = None, num_classes: int = 80) -> "MaskRCNN":
    """Mask R-CNN on ResNet-50's dilated fifth stage; arguments as of `maskrcnn_resnet50_fpn`."""
    return _build("resnet50", "c5", weights, num_classes)


def maskrcnn_resnet101_c5(weights: str | None = None, num_classes: int = 80) -> "MaskRCNN":
    """Mask R-CNN on ResNet-101's dilated fifth stage; arguments as of `maskrcnn_resnet50_fpn`."""
    return _build("resnet101", "c5", weights, num_classes)
