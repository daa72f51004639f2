"""Rules to convert weights of Caffe2's Detectron: backbones, including MSRA's, and whole models."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from .layouts import box_rows_for_every_class, reverse_channels
from .origins import MAX_HEAD_CONVS, Rules, Settings, WeightsOrigin

_NORM_PARTS = {
    "s": "weight",
    "b": "bias",
    "gamma": "weight",
    "beta": "bias",
    "rm": "running_mean",
    "running_mean": "running_mean",
    "riv": "running_var",
    "running_var": "running_var",
}
_PARTS = {"w": "weight", "b": "bias"}


def _norm_rules(theirs: str, ours: str) -> Rules:
    return tuple((rf"{theirs}_[bg]n_{a}", f"{ours}.{b}") for a, b in _NORM_PARTS.items())


def _rules(theirs: str, ours: str) -> Rules:
    return tuple((rf"{theirs}_{a}", f"{ours}.{b}") for a, b in _PARTS.items())


def _block_rules(stage: int) -> Rules:
    theirs, ours = rf"res{stage + 1}_(\d+)_branch", rf"backbone.body.layer{stage}.\1"
    return (
        (rf"{theirs}1_w", rf"{ours}.downsample.0.weight"),
        *_norm_rules(f"{theirs}1", rf"{ours}.downsample.1"),
        *(
            rule
            for i, letter in enumerate("abc", start=1)
            for rule in (
                (rf"{theirs}2{letter}_w", f"{ours}.conv{i}.weight"),
                *_norm_rules(f"{theirs}2{letter}", f"{ours}.bn{i}"),
            )
        ),
    )


def _conv_rules(theirs: str, ours: str) -> Rules:
    """Return the renaming rules for a convolution and its optional normalisation.

    `theirs` is a regular expression for Caffe2's blob name, `ours` is this model's module name.
    """
    return (*_rules(theirs, f"{ours}.0"), *_norm_rules(theirs, f"{ours}.1"))


_RULES: Rules = (
    ("conv1_w", "backbone.body.conv1.weight"),
    *_norm_rules("(?:res_)?conv1", "backbone.body.bn1"),
    *(rule for stage in range(1, 5) for rule in _block_rules(stage)),
    *(
        rule
        for i in range(4)
        for rule in (
            *_conv_rules(
                rf"fpn_inner_res{i + 2}_\d+_sum(?:_lateral)?", f"backbone.fpn.inner_blocks.{i}"
            ),
            *_conv_rules(rf"fpn_res{i + 2}_\d+_sum", f"backbone.fpn.layer_blocks.{i}"),
        )
    ),
    *_rules("conv_rpn(?:_fpn2)?", "rpn.head.conv.0.0"),
    *_rules("rpn_cls_logits(?:_fpn2)?", "rpn.head.cls_logits"),
    *_rules("rpn_bbox_pred(?:_fpn2)?", "rpn.head.bbox_pred"),
    *_rules("(fc6|fc7)", r"roi_heads.box_head.\1"),
    *_rules("(cls_score|bbox_pred)", r"roi_heads.box_predictor.\1"),
    *_rules("(conv5_mask|mask_fcn_logits)", r"roi_heads.mask_predictor.\1"),
    *(
        rule
        for i in range(MAX_HEAD_CONVS)
        for rule in (
            *_conv_rules(rf"head_conv{i + 1}", f"roi_heads.box_head.{i}"),
            *_conv_rules(rf"_\[mask\]_fcn{i + 1}", f"roi_heads.mask_head.{i}"),
        )
    ),
)


def _layout(tensors: dict[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # Only C4 models have this tensor. Their fifth ResNet stage is named as a part of the backbone,
    # but is the head that boxes and masks share.
    if "conv_rpn_w" in state:
        tensors = {
            name.replace("backbone.body.layer4", "roi_heads.shared_head"): tensor
            for name, tensor in tensors.items()
        }
    return reverse_channels(box_rows_for_every_class(_with_statistics(tensors, state)))


def _with_statistics(tensors: dict[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors`, with mean 0 and variance 1 for batch norms that have only scale and shift.

    `tensors` have this model's names. `state` holds all tensors of the file under the file's names.
    """
    if not any("_bn_" in name for name in state):
        return tensors
    merged = [
        name
        for name in tensors
        if re.fullmatch(r".*(?:\.bn\d|\.downsample\.1)\.weight", name)
        and name.replace(".weight", ".running_mean") not in tensors
    ]
    means = {n.replace(".weight", ".running_mean"): torch.zeros_like(tensors[n]) for n in merged}
    variances = {n.replace(".weight", ".running_var"): torch.ones_like(tensors[n]) for n in merged}
    return tensors | means | variances


def legacy_conventions(structure: Settings, state: Mapping[str, Tensor]) -> Settings:
    """Return the settings to assume for weights of Caffe2's Detectron and of maskrcnn-benchmark.

    The files do not store these settings. The values are the defaults of both programs for the
    architecture in `structure`.

    Args:
        structure: settings that were inferred from the tensors, such as the normalisation.
        state: tensors of the file, under the names that they have in the file.
    """
    gn = structure["backbone.norm"] == "gn"
    has_statistics = any(name.endswith(("bn_rm", "bn_running_mean")) for name in state)
    fpn = structure.get("backbone.features") == "fpn"
    c4 = structure.get("backbone.features") == "c4"
    return {
        # Frozen batch norms of maskrcnn-benchmark, and batch norms of which only scale and shift
        # are stored, add no epsilon to the variance.
        "backbone.norm_eps": 1e-5 if gn or has_statistics else 0.0,
        "backbone.stride_in_1x1": not gn,
        "pixel_mean": (122.7717, 115.9465, 102.9801),
        "pixel_std": (1.0, 1.0, 1.0),
        "inclusive_boxes": True,
        "anchors.convention": "legacy",
        "rpn.pre_nms_top_n_train": 2000 if fpn else 12000,
        "rpn.pre_nms_top_n_test": 1000 if fpn else 6000,
        "rpn.min_side": 0.0,
        "rpn.smooth_l1_beta": 1 / 9,
        "roi.aligned": False,
        "roi.sampling_ratio": 2 if fpn else 0,
        "roi.min_side": 0.0,
        "roi.smooth_l1_beta": 1.0,
    } | ({"roi.box_pool": 14} if c4 else {})


ORIGIN = WeightsOrigin(
    name="Caffe2",
    signature=r"res2_0_branch2a_w",
    rules=_RULES,
    # The bias of the first convolution is unused, because a normalisation follows.
    ignored=r".*_momentum|conv1_b|(?:fc1000|pred)_[wb]|kps_\w+|conv_fcn\w+",
    layout=_layout,
    conventions=legacy_conventions,
)
