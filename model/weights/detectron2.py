"""Rules to convert weights of detectron2: `.pkl` files of its zoo, `.pth` files of its trainer."""

from collections.abc import Mapping

import torch
from torch import Tensor

from .layouts import background_first, reverse_channels
from .origins import MAX_HEAD_CONVS, Rules, Settings, WeightsOrigin

# Pixel statistics of torchvision's ResNets. Files of these ResNets in detectron2's format lack the
# statistics, so they are added when such a file is read.
TORCHVISION_STATISTICS = {
    "pixel_mean": torch.tensor([123.675, 116.28, 103.53]),
    "pixel_std": torch.tensor([58.395, 57.12, 57.375]),
}

# Name of a boolean tensor that is True if the network takes BGR. Weights files lack it: it is added
# if config.yaml states the channel order.
IS_BGR = "pixel_is_bgr"

_MSRA_MEAN_BGR = (103.53, 116.28, 123.675)
_BOX_HEAD, _MASK_HEAD = r"roi_heads\.box_head", r"roi_heads\.mask_head"


def _stage_rules(theirs: str, ours: str) -> Rules:
    return (
        (rf"{theirs}\.(\d+)\.conv(\d)\.norm\.(\w+)", rf"{ours}.\1.bn\2.\3"),
        (rf"{theirs}\.(\d+)\.conv(\d)\.weight", rf"{ours}.\1.conv\2.weight"),
        (rf"{theirs}\.(\d+)\.shortcut\.norm\.(\w+)", rf"{ours}.\1.downsample.1.\2"),
        (rf"{theirs}\.(\d+)\.shortcut\.weight", rf"{ours}.\1.downsample.0.weight"),
    )


def _conv_rules(theirs: str, ours: str) -> Rules:
    """Return the renaming rules for a convolution and its optional normalisation.

    `theirs` is a regular expression for detectron2's module name, `ours` is this model's module
    name.
    """
    return (
        (rf"{theirs}\.norm\.(\w+)", rf"{ours}.1.\1"),
        (rf"{theirs}\.(weight|bias)", rf"{ours}.0.\1"),
    )


# Optional prefixes of a ResNet's tensor names. Files of a backbone have no prefix, files of a
# detector have `backbone.`, or `backbone.bottom_up.` with a feature pyramid.
_BODY = r"(?:backbone\.)?(?:bottom_up\.)?"
_RULES: Rules = (
    (rf"{_BODY}stem\.conv1\.norm\.(\w+)", r"backbone.body.bn1.\1"),
    (rf"{_BODY}stem\.conv1\.weight", r"backbone.body.conv1.weight"),
    *(
        r
        for i in range(1, 5)
        for r in _stage_rules(rf"{_BODY}res{i + 1}", f"backbone.body.layer{i}")
    ),
    *_stage_rules(r"roi_heads\.res5", "roi_heads.shared_head"),
    *(
        rule
        for i in range(4)
        for theirs, ours in (("lateral", "inner"), ("output", "layer"))
        for rule in _conv_rules(
            rf"backbone\.fpn_{theirs}{i + 2}", f"backbone.fpn.{ours}_blocks.{i}"
        )
    ),
    (r"proposal_generator\.rpn_head\.conv\.(weight|bias)", r"rpn.head.conv.0.0.\1"),
    (r"proposal_generator\.rpn_head\.conv\.conv(\d)\.(\w+)", r"rpn.head.conv.\1.0.\2"),
    (r"proposal_generator\.rpn_head\.objectness_logits\.(\w+)", r"rpn.head.cls_logits.\1"),
    (r"proposal_generator\.rpn_head\.anchor_deltas\.(\w+)", r"rpn.head.bbox_pred.\1"),
    *(
        rule
        for i in range(MAX_HEAD_CONVS)
        for rule in (
            *_conv_rules(rf"{_BOX_HEAD}\.conv{i + 1}", f"roi_heads.box_head.{i}"),
            *_conv_rules(rf"{_MASK_HEAD}\.mask_fcn{i + 1}", f"roi_heads.mask_head.{i}"),
        )
    ),
    (rf"{_BOX_HEAD}\.fc1\.(\w+)", r"roi_heads.box_head.fc6.\1"),
    (rf"{_BOX_HEAD}\.fc2\.(\w+)", r"roi_heads.box_head.fc7.\1"),
    (r"roi_heads\.box_predictor\.(?:cls_score|bbox_pred)\.\w+", r"\g<0>"),
    (rf"{_MASK_HEAD}\.deconv\.(\w+)", r"roi_heads.mask_predictor.conv5_mask.\1"),
    (rf"{_MASK_HEAD}\.predictor\.(\w+)", r"roi_heads.mask_predictor.mask_fcn_logits.\1"),
)


def _pixel_statistics(state: Mapping[str, Tensor]) -> tuple[list[float], list[float]]:
    """Return pixel mean and standard deviation (0..255) in the network's channel order.

    `state` holds the file's tensors. If the file lacks a value, return that of MSRA's ResNets.
    """
    mean, std = (state.get(f"pixel_{name}") for name in ("mean", "std"))
    return (
        list(_MSRA_MEAN_BGR) if mean is None else [round(x, 4) for x in mean.flatten().tolist()],
        [1.0] * 3 if std is None else [round(x, 4) for x in std.flatten().tolist()],
    )


def _takes_bgr(state: Mapping[str, Tensor]) -> bool:
    if IS_BGR in state:
        return bool(state[IS_BGR])
    # The order of the pixel means shows the channel order: in all published means, red is largest.
    mean, _ = _pixel_statistics(state)
    return mean[0] <= mean[2]


def _layout(tensors: dict[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors = background_first(tensors)
    return reverse_channels(tensors) if _takes_bgr(state) else tensors


def _conventions(structure: Settings, state: Mapping[str, Tensor]) -> Settings:
    mean, std = _pixel_statistics(state)
    if _takes_bgr(state):
        mean, std = mean[::-1], std[::-1]
    # MSRA's ResNets fold the pixels' standard deviation into their weights, and have their stride
    # in the 1x1 convolution.
    msra = std == [1.0] * 3 and structure["backbone.norm"] != "gn"
    fpn = structure.get("backbone.features") == "fpn"
    c4 = structure.get("backbone.features") == "c4"
    return {
        "backbone.norm_eps": 1e-5,
        "backbone.stride_in_1x1": msra,
        "pixel_mean": tuple(mean),
        "pixel_std": tuple(std),
        "inclusive_boxes": False,
        "mask_paste": "detectron2",
        "anchors.convention": "detectron2",
        "rpn.pre_nms_top_n_train": 2000 if fpn else 12000,
        "rpn.pre_nms_top_n_test": 1000 if fpn else 6000,
        "rpn.post_nms_top_n_train": 1000 if fpn else 2000,
        "rpn.min_side": 0.0,
        "rpn.smooth_l1_beta": 0.0,
        "roi.aligned": True,
        "roi.sampling_ratio": 0,
        "roi.min_side": 0.0,
        "roi.smooth_l1_beta": 0.0,
    } | ({"roi.box_pool": 14} if c4 else {})


ORIGIN = WeightsOrigin(
    name="detectron2",
    signature=rf"{_BODY}stem\.conv1\.weight",
    rules=_RULES,
    ignored=(
        r"pixel_(?:mean|std|is_bgr)|proposal_generator\.anchor_generator\..+|(?:stem\.)?(?:fc|linear)\..+"
        r"|roi_heads\.keypoint_\w+\..+|sem_seg_head\..+"
    ),
    layout=_layout,
    conventions=_conventions,
    resize="detectron2",
)
