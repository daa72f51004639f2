"""Rules to convert weights of torchvision: Mask R-CNN (both versions) and ResNet classifiers."""

from collections.abc import Mapping

from torch import Tensor

from .origins import MAX_HEAD_CONVS, Rules, Settings, WeightsOrigin

# Before torchvision 0.13, the names of some layers lacked the layer's index in its `Sequential`.
_RULES: Rules = (
    (r"(?:backbone\.body\.)?((?:conv1|bn1)\.\w+)", r"backbone.body.\1"),
    (
        r"(?:backbone\.body\.)?(layer[1-4]\.\d+\.(?:conv\d|bn\d|downsample\.[01])\.\w+)",
        r"backbone.body.\1",
    ),
    (r"backbone\.fpn\.(inner|layer)_blocks\.(\d)\.(\w+)", r"backbone.fpn.\1_blocks.\2.0.\3"),
    (r"backbone\.fpn\.(?:inner|layer)_blocks\.\d\.[01]\.\w+", r"\g<0>"),
    (r"rpn\.head\.conv\.(weight|bias)", r"rpn.head.conv.0.0.\1"),
    (r"rpn\.head\.(?:conv\.\d\.0|cls_logits|bbox_pred)\.\w+", r"\g<0>"),
    (r"roi_heads\.box_head\.(?:fc6|fc7|\d+(?:\.[01])?)\.\w+", r"\g<0>"),
    *(
        (rf"roi_heads\.mask_head\.mask_fcn{i + 1}\.(\w+)", rf"roi_heads.mask_head.{i}.0.\1")
        for i in range(MAX_HEAD_CONVS)
    ),
    (r"roi_heads\.mask_head\.\d\.[01]\.\w+", r"\g<0>"),
    (r"roi_heads\.(?:box|mask)_predictor\.\w+\.\w+", r"\g<0>"),
)


def _conventions(structure: Settings, _: Mapping[str, Tensor]) -> Settings:
    # The published weights were trained with epsilon 0, which the file does not record. Recognise
    # them by their number of classes and their frozen batch norm.
    published = structure.get("num_classes") == 90 and structure["backbone.norm"] == "frozen_bn"
    return {
        "backbone.norm_eps": 0.0 if published else 1e-5,
        "backbone.stride_in_1x1": False,
        "pixel_mean": (123.675, 116.28, 103.53),
        "pixel_std": (58.395, 57.12, 57.375),
        "inclusive_boxes": False,
        "anchors.convention": "torchvision",
        "roi.aligned": False,
        "roi.sampling_ratio": 2,
    }


ORIGIN = WeightsOrigin(
    name="torchvision",
    signature=r"(?:backbone\.body\.)?conv1\.weight",
    rules=_RULES,
    ignored=r"fc\.(?:weight|bias)|roi_heads\.keypoint_\w+\..+",
    layout=lambda tensors, _: tensors,
    conventions=_conventions,
    resize="torchvision",
)
