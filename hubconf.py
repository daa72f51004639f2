"""Entry points of `torch.hub.load(REPOSITORY, "maskrcnn_resnet50_fpn", weights=FILE)`."""

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .model.mask_rcnn import MaskRCNN

dependencies = ["numpy", "pydantic", "torch", "torchvision", "yaml"]


def _load_package() -> None:
    """Import `maskrcnn_trt` from this file's folder unless it is imported already."""
    # The repository root is the package's folder. torch.hub clones it into a folder of another
    # name, and does not install the package.
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
    from maskrcnn_trt.model.weights.loading import build_model

    model: MaskRCNN = build_model(name, features, weights, num_classes)
    return model


def maskrcnn_resnet50_fpn(weights: str | None = None, num_classes: int = 80) -> "MaskRCNN":
    """Build Mask R-CNN with ResNet-50 and a feature pyramid, in evaluation mode.

    Args:
        weights: name that `maskrcnn weights list` prints, such as
            `torchvision:maskrcnn_resnet50_fpn`, or path or http(s) URL of a weights file. The file
            is a checkpoint of this project, or holds the weights of all layers of a Mask R-CNN of
            torchvision, detectron2, maskrcnn-benchmark or Caffe2. None: random weights. URLs and
            names require the packages httpx and tenacity.
        num_classes: number of foreground classes. Used only with random weights.
    """
    return _build("resnet50", "fpn", weights, num_classes)


def maskrcnn_resnet101_fpn(weights: str | None = None, num_classes: int = 80) -> "MaskRCNN":
    """Build Mask R-CNN with ResNet-101 and a feature pyramid, in evaluation mode.

    `weights` (name, path or URL; None: random) and `num_classes` are as in `maskrcnn_resnet50_fpn`.
    """
    return _build("resnet101", "fpn", weights, num_classes)


def maskrcnn_resnet50_c4(weights: str | None = None, num_classes: int = 80) -> "MaskRCNN":
    """Build Mask R-CNN with ResNet-50 C4 features, in evaluation mode.

    `weights` (name, path or URL; None: random) and `num_classes` are as in `maskrcnn_resnet50_fpn`.
    """
    return _build("resnet50", "c4", weights, num_classes)


def maskrcnn_resnet101_c4(weights: str | None = None, num_classes: int = 80) -> "MaskRCNN":
    """Build Mask R-CNN with ResNet-101 C4 features, in evaluation mode.

    `weights` (name, path or URL; None: random) and `num_classes` are as in `maskrcnn_resnet50_fpn`.
    """
    return _build("resnet101", "c4", weights, num_classes)


def maskrcnn_resnet50_c5(weights: str | None = None, num_classes: int = 80) -> "MaskRCNN":
    """Build Mask R-CNN with dilated ResNet-50 C5 features, in evaluation mode.

    `weights` (name, path or URL; None: random) and `num_classes` are as in `maskrcnn_resnet50_fpn`.
    """
    return _build("resnet50", "c5", weights, num_classes)


def maskrcnn_resnet101_c5(weights: str | None = None, num_classes: int = 80) -> "MaskRCNN":
    """Build Mask R-CNN with dilated ResNet-101 C5 features, in evaluation mode.

    `weights` (name, path or URL; None: random) and `num_classes` are as in `maskrcnn_resnet50_fpn`.
    """
    return _build("resnet101", "c5", weights, num_classes)
