"""Published models of torchvision and detectron2: URL, checksum, data set, input size, licence.

This module does not import torch.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, Final, Literal

from ..bundle.manifest import Category
from ..download.checksums import Checksum

Zoo = Literal["torchvision", "detectron2"]

# Hosts of the files by zoo. A mirror has the files at the same paths.
HOSTS: Final[Mapping[Zoo, str]] = {
    "torchvision": "https://download.pytorch.org",
    "detectron2": "https://dl.fbaipublicfiles.com",
}
# Licences of the weights, as far as their publishers state one.
LICENCES: Final[Mapping[Zoo, str]] = {
    "torchvision": "not stated; terms of the training data may apply",
    "detectron2": "CC BY-SA 3.0",
}

# torchvision's COCO_V1 weights. The digits in a name are the first ones of the file's SHA-256.
_TORCHVISION: Final = {
    "maskrcnn_resnet50_fpn": "maskrcnn_resnet50_fpn_coco-bf2d0c1e.pth",
    "maskrcnn_resnet50_fpn_v2": "maskrcnn_resnet50_fpn_v2_coco-73cbd019.pth",
}
# Id of each model in detectron2's zoo, and first digits of the file's MD5, by folder and name of
# the configuration file.
_DETECTRON2: Final = {
    "COCO-InstanceSegmentation": {
        "mask_rcnn_R_50_C4_1x": ("137259246", "9243eb"),
        "mask_rcnn_R_50_DC5_1x": ("137260150", "4f86c3"),
        "mask_rcnn_R_50_FPN_1x": ("137260431", "a54504"),
        "mask_rcnn_R_50_C4_3x": ("137849525", "4ce675"),
        "mask_rcnn_R_50_DC5_3x": ("137849551", "84107b"),
        "mask_rcnn_R_50_FPN_3x": ("137849600", "f10217"),
        "mask_rcnn_R_101_C4_3x": ("138363239", "a2914c"),
        "mask_rcnn_R_101_DC5_3x": ("138363294", "0464b7"),
        "mask_rcnn_R_101_FPN_3x": ("138205316", "a3ec72"),
    },
    "new_baselines": {
        "mask_rcnn_R_50_FPN_100ep_LSJ": ("42047764", "bb69de"),
        "mask_rcnn_R_50_FPN_200ep_LSJ": ("42047638", "89a8d3"),
        "mask_rcnn_R_50_FPN_400ep_LSJ": ("42019571", "14d201"),
        "mask_rcnn_R_101_FPN_100ep_LSJ": ("42025812", "4f7b58"),
        "mask_rcnn_R_101_FPN_200ep_LSJ": ("42131867", "0bb7ae"),
        "mask_rcnn_R_101_FPN_400ep_LSJ": ("42073830", "f96b26"),
    },
    "Misc": {
        "mask_rcnn_R_50_FPN_3x_gn": ("138602888", "dc5d9e"),
        "mask_rcnn_R_50_FPN_3x_syncbn": ("169527823", "3b3c51"),
        "scratch_mask_rcnn_R_50_FPN_3x_gn": ("138602908", "01ca85"),
        "scratch_mask_rcnn_R_50_FPN_9x_gn": ("183808979", "da7b4c"),
        "scratch_mask_rcnn_R_50_FPN_9x_syncbn": ("184226666", "5ce33e"),
    },
    "COCO-PanopticSegmentation": {
        "panoptic_fpn_R_50_1x": ("139514544", "dbfeb4"),
        "panoptic_fpn_R_50_3x": ("139514569", "c10459"),
        "panoptic_fpn_R_101_3x": ("139514519", "cafdb1"),
    },
    "Cityscapes": {"mask_rcnn_R_50_FPN": ("142423278", "af9cf5")},
    "Detectron1-Comparisons": {"mask_rcnn_R_50_FPN_noaug_1x": ("137781281", "62ca52")},
    "LVISv0.5-InstanceSegmentation": {
        "mask_rcnn_R_50_FPN_1x": ("144219072", "571f7c"),
        "mask_rcnn_R_101_FPN_1x": ("144219035", "824ab5"),
    },
}

# Cityscapes classes that have instance masks, with Cityscapes' ids, in the order of detectron2's
# labels.
_CITYSCAPES: Final = tuple(
    Category(id=id_, name=name)
    for id_, name in {
        24: "person",
        25: "rider",
        26: "car",
        27: "truck",
        28: "bus",
        31: "train",
        32: "motorcycle",
        33: "bicycle",
    }.items()
)
# Settings of detectron2's configuration files that the weights files may lack. Keys are regular
# expressions that match the start of a model's name or folder. Pixel statistics are in RGB order.
_SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "scratch_.*_9x_": {"pixel_std": (58.395, 57.12, 57.375), "backbone.stride_in_1x1": False},
    ".*_noaug_": {"roi.aligned": False, "roi.sampling_ratio": 2},
    # With 1,230 classes and a low threshold, an image can have more candidates for NMS than the
    # default limit.
    "LVIS": {"roi.score_threshold": 0.0001, "roi.max_detections": 300, "roi.nms_candidates": 8192},
}
# Reasons why models of the zoos are not supported, by a regular expression that matches the start
# of their names.
_UNSUPPORTED: Final = {
    r"(faster|fast)_?rcnn|retinanet|rpn_|fcos|ssd": "it detects boxes without masks",
    r".*keypoint_?rcnn": "it detects keypoints without masks",
    r".*dconv": "it has deformable convolutions",
    r"cascade_": "it has a cascade of box heads",
    r".*_X_\d+": "its backbone is a ResNeXt",
    r".*regnet": "its backbone is a RegNet",
    r".*(mobilenet|swin|vit)": "its backbone is not a ResNet",
}


class ZooError(Exception):
    """The model zoo lacks the requested model, or this program does not support the model."""


@dataclass(frozen=True, kw_only=True)
class ZooModel:
    """Published model: weights file, training data set, and size of resized images at test time."""

    zoo: Zoo
    # Unique short name without the zoo, such as `mask_rcnn_R_50_FPN_3x`.
    name: str
    # Absolute path of the weights file on its host.
    path: str
    # Checksum of the file: the first digits of its hash, which are a part of its name.
    checksum: Checksum
    dataset: Literal["COCO", "Cityscapes", "LVIS v0.5"] = "COCO"
    # Test size: shorter side of resized images, and maximum of the longer side, in pixels.
    min_size: int = 800
    max_size: int = 1333
    # Ids and names of the classes. None: those that `default_categories` returns.
    categories: tuple[Category, ...] | None = None
    # Values of `ModelConfig` by dotted key that replace the origin's defaults.
    settings: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def __str__(self) -> str:
        return f"{self.zoo}:{self.name}"

    @property
    def url(self) -> str:
        """URL of the published file."""
        return HOSTS[self.zoo] + self.path

    @property
    def file_name(self) -> str:
        """Name of the published file, unique among all models."""
        return PurePosixPath(self.path).name

    @property
    def licence(self) -> str:
        """Licence of the weights."""
        return LICENCES[self.zoo]


def is_zoo_name(reference: object) -> bool:
    """Whether a model reference is of the form `torchvision:NAME` or `detectron2:NAME`."""
    return re.match(rf"(?:{'|'.join(HOSTS)}):(?!//)", str(reference)) is not None


def zoo_model(reference: str) -> ZooModel:
    """Return the published model that a reference such as `detectron2:mask_rcnn_R_50_FPN_3x` names.

    The path of the model's configuration file in detectron2 is accepted as a name too, as in
    `detectron2:COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml`.

    Raises:
        ZooError: No published model has this name, or this program does not support the model.
    """
    zoo, _, name = reference.partition(":")
    name = re.sub(r"\.(yaml|py)$", "", name)
    for model in ZOO_MODELS:
        if model.zoo == zoo and name in (model.name, _config_name(model)):
            return model
    for pattern, reason in _UNSUPPORTED.items():
        if re.match(pattern, name.rpartition("/")[2], re.IGNORECASE):
            raise ZooError(
                f"{reference} is not supported: {reason}; only Mask R-CNN on ResNet with FPN, "
                "C4 or C5 is supported. `maskrcnn weights list` lists the models"
            )
    names = [model.name for model in ZOO_MODELS if model.zoo == zoo]
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" (did you mean {zoo}:{close[0]}?)" if close else ""
    raise ZooError(f"{zoo} has no model {name!r}{hint}; `maskrcnn weights list` lists the models")


def _config_name(model: ZooModel) -> str:
    """Return the path of a model's configuration file in detectron2, without its suffix."""
    return "/".join(PurePosixPath(model.path).parts[2:4])


def _torchvision_models() -> Iterator[ZooModel]:
    for name, file in _TORCHVISION.items():
        digits = file.partition("-")[2].partition(".")[0]
        yield ZooModel(
            zoo="torchvision",
            name=name,
            path=f"/models/{file}",
            checksum=Checksum("sha256", digits),
        )


def _detectron2_models() -> Iterator[ZooModel]:
    for folder, files in _DETECTRON2.items():
        for name, (model_id, digits) in files.items():
            lvis = folder.startswith("LVIS")
            cityscapes = folder == "Cityscapes"
            settings: dict[str, Any] = {}
            for pattern, values in _SETTINGS.items():
                if re.match(pattern, name) or re.match(pattern, folder):
                    settings |= values
            yield ZooModel(
                zoo="detectron2",
                # Two LVIS models have the names of COCO models, so the folder is part of their
                # names.
                name=f"{folder}/{name}" if lvis else name,
                path=f"/detectron2/{folder}/{name}/{model_id}/model_final_{digits}.pkl",
                checksum=Checksum("md5", digits),
                dataset="LVIS v0.5" if lvis else "Cityscapes" if cityscapes else "COCO",
                min_size=1024 if cityscapes else 800,
                max_size=2048 if cityscapes else 1333,
                categories=_CITYSCAPES if cityscapes else None,
                settings=MappingProxyType(settings),
            )


ZOO_MODELS: Final = (*_torchvision_models(), *_detectron2_models())
