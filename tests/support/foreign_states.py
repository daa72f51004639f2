"""Conversion of state dicts to the names and layouts of other implementations.

Each conversion follows the documented names of one implementation, independently of the package.
"""

import re

import torch
from torch import Tensor

from maskrcnn_trt.model.config.schema import ModelConfig
from maskrcnn_trt.model.mask_rcnn import MaskRCNN

State = dict[str, Tensor]


def random_state(config: ModelConfig, *, background_rows: bool = True) -> State:
    """Return a state dict of random values for a model.

    If `background_rows` is False, the weights and biases that compute box deltas and mask logits of
    the background class are 0. The model does not use these deltas and logits.
    """
    with torch.device("meta"):
        names = MaskRCNN(config).state_dict()
    generator = torch.Generator().manual_seed(0)
    state = {
        name: torch.zeros((), dtype=torch.int64)
        if name.endswith("num_batches_tracked")
        else torch.rand(tensor.shape, generator=generator)
        for name, tensor in names.items()
    }
    if not background_rows:
        for name, rows in (("box_predictor.bbox_pred", 4), ("mask_predictor.mask_fcn_logits", 1)):
            for kind in ("weight", "bias"):
                state[f"roi_heads.{name}.{kind}"][:rows] = 0
    return state


def _bgr(state: State) -> State:
    stem = "backbone.body.conv1.weight"
    return state | {stem: state[stem][:, [2, 1, 0]]}


def detectron2(state: State, *, pyramid: bool) -> State:
    """Convert a state dict to detectron2. `pyramid`: whether the backbone has a feature pyramid.

    Input channels are in the order BGR. The background class is the last one in the scores, and
    absent in box deltas and masks.
    """
    theirs = {_detectron2_name(name, pyramid): tensor for name, tensor in _bgr(state).items()}
    if "rpn.head.conv.1.0.weight" in state:
        theirs = {
            re.sub(r"rpn\.head\.conv\.(\d)\.0", r"proposal_generator.rpn_head.conv.conv\1", n): t
            for n, t in theirs.items()
        }
        for kind in ("weight", "bias"):
            single = f"proposal_generator.rpn_head.conv.{kind}"
            theirs[f"proposal_generator.rpn_head.conv.conv0.{kind}"] = theirs.pop(single)
    for kind in ("weight", "bias"):
        scores = theirs[f"roi_heads.box_predictor.cls_score.{kind}"]
        theirs[f"roi_heads.box_predictor.cls_score.{kind}"] = torch.cat([scores[1:], scores[:1]])
        for name, rows in (("box_predictor.bbox_pred", 4), ("mask_head.predictor", 1)):
            theirs[f"roi_heads.{name}.{kind}"] = theirs[f"roi_heads.{name}.{kind}"][rows:]
    return theirs


def _detectron2_name(name: str, pyramid: bool) -> str:
    body = "backbone.bottom_up" if pyramid else "backbone"
    name = name.replace("backbone.body.bn1", f"{body}.stem.conv1.norm")
    name = name.replace("backbone.body.conv1", f"{body}.stem.conv1")
    for stage in (1, 2, 3, 4):
        name = name.replace(f"backbone.body.layer{stage}", f"{body}.res{stage + 1}")
    name = name.replace("roi_heads.shared_head", "roi_heads.res5")
    name = re.sub(r"(res\d\.\d+)\.bn(\d)", r"\1.conv\2.norm", name)
    name = name.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")
    for level in range(4):
        for ours, theirs in (("inner", "lateral"), ("layer", "output")):
            block = f"backbone.fpn.{ours}_blocks.{level}"
            name = name.replace(f"{block}.0", f"backbone.fpn_{theirs}{level + 2}")
            name = name.replace(f"{block}.1", f"backbone.fpn_{theirs}{level + 2}.norm")
    name = name.replace("rpn.head.conv.0.0", "proposal_generator.rpn_head.conv")
    name = name.replace("rpn.head.cls_logits", "proposal_generator.rpn_head.objectness_logits")
    name = name.replace("rpn.head.bbox_pred", "proposal_generator.rpn_head.anchor_deltas")
    name = name.replace("box_head.fc6", "box_head.fc1").replace("box_head.fc7", "box_head.fc2")
    name = name.replace("box_head.5.", "box_head.fc1.")  # after four convolutions
    for head, conv in (("box_head", "conv"), ("mask_head", "mask_fcn")):
        for i in range(4):
            name = name.replace(f"{head}.{i}.0", f"{head}.{conv}{i + 1}")
            name = name.replace(f"{head}.{i}.1", f"{head}.{conv}{i + 1}.norm")
    name = name.replace("mask_predictor.conv5_mask", "mask_head.deconv")
    return name.replace("mask_predictor.mask_fcn_logits", "mask_head.predictor")


def maskrcnn_benchmark(state: State) -> State:
    """Convert a state dict to maskrcnn-benchmark, with input channels in the order BGR.

    If both heads share the ResNet's fifth stage, the result contains it twice, once per head.
    """
    theirs = {}
    for ours, tensor in _bgr(state).items():
        name = re.sub(r"body\.(conv1|bn1)", r"body.stem.\1", ours)
        for level in range(4):
            for kind in ("inner", "layer"):
                block, their_block = f"{kind}_blocks.{level}", f"fpn_{kind}{level + 1}"
                group_norm = f"backbone.fpn.{block}.1.weight" in state
                name = name.replace(f"{block}.0", f"{their_block}.0" if group_norm else their_block)
                name = name.replace(f"{block}.1", f"{their_block}.1")
        name = name.replace("head.conv.0.0", "head.conv")
        name = re.sub(r"box_head\.(fc\d)", r"box.feature_extractor.\1", name)
        name = name.replace("box_head.5.", "box.feature_extractor.fc6.")
        for i in range(4):
            for part in (0, 1):
                xconv = f"box.feature_extractor.xconvs.{3 * i + part}"
                name = name.replace(f"box_head.{i}.{part}", xconv)
                fcn = f"mask.feature_extractor.mask_fcn{i + 1}"
                group_norm = "roi_heads.mask_head.0.1.weight" in state
                fcn = f"{fcn}.{part}" if group_norm else fcn
                name = name.replace(f"mask_head.{i}.{part}", fcn)
        name = re.sub(r"(box|mask)_predictor", r"\1.predictor", name)
        for head in ("box", "mask") if "shared_head" in name else ("",):
            own = f"{head}.feature_extractor.head.layer4"
            theirs["module." + name.replace("shared_head", own)] = tensor
    return theirs


def caffe2(state: State, *, merged: bool) -> State:
    """Convert a state dict to Caffe2, with input channels in the order BGR.

    If `merged` is set, batch norms have only scale and shift, and no running statistics.
    """
    pyramid = "backbone.fpn.inner_blocks.0.0.weight" in state
    last = "23" if any("layer3.22." in name for name in state) else "6"
    sums = {0: "2", 1: "3", 2: str(int(last) - 1), 3: "2"}
    kinds = {"weight": "w", "bias": "b"}
    norms = {"weight": "s", "bias": "b", "running_mean": "rm", "running_var": "riv"}
    theirs = {}
    for ours, tensor in _bgr(state).items():
        stem, _, kind = ours.rpartition(".")
        stem = stem.replace("roi_heads.shared_head", "backbone.body.layer4")
        block = re.fullmatch(r"backbone\.body\.layer(\d)\.(\d+)\.(\w+?)(\d)?(?:\.(\d))?", stem)
        level = re.fullmatch(r"backbone\.fpn\.(inner|layer)_blocks\.(\d)\.0", stem)
        if merged and kind.startswith("running"):
            continue
        if stem == "backbone.body.conv1":
            name = "conv1_w"
        elif stem == "backbone.body.bn1":
            name = f"res_conv1_bn_{norms[kind]}"
        elif block:
            stage, index, layer, number, part = block.groups()
            branch = "1" if layer == "downsample" else "2" + " abc"[int(number)]
            is_norm = layer == "bn" or part == "1"
            suffix = f"bn_{norms[kind]}" if is_norm else kinds[kind]
            name = f"res{int(stage) + 1}_{index}_branch{branch}_{suffix}"
        elif level:
            i = int(level[2])
            lateral = "_lateral" if i < 3 else ""
            inner = f"fpn_inner_res{i + 2}_{sums[i]}_sum{lateral}"
            name = inner if level[1] == "inner" else f"fpn_res{i + 2}_{sums[i]}_sum"
            name += f"_{kinds[kind]}"
        else:
            name = {
                "rpn.head.conv.0.0": "conv_rpn_fpn2" if pyramid else "conv_rpn",
                "rpn.head.cls_logits": "rpn_cls_logits_fpn2" if pyramid else "rpn_cls_logits",
                "rpn.head.bbox_pred": "rpn_bbox_pred_fpn2" if pyramid else "rpn_bbox_pred",
                "roi_heads.box_head.fc6": "fc6",
                "roi_heads.box_head.fc7": "fc7",
                "roi_heads.box_predictor.cls_score": "cls_score",
                "roi_heads.box_predictor.bbox_pred": "bbox_pred",
                "roi_heads.mask_predictor.conv5_mask": "conv5_mask",
                "roi_heads.mask_predictor.mask_fcn_logits": "mask_fcn_logits",
                **{f"roi_heads.mask_head.{i}.0": f"_[mask]_fcn{i + 1}" for i in range(4)},
            }[stem] + f"_{kinds[kind]}"
        theirs[name] = tensor
    return theirs


def torchvision_before_0_13(state: State) -> State:
    """Convert a state dict to torchvision before 0.13, in which some names were different."""
    theirs = {}
    for ours, tensor in state.items():
        name = re.sub(r"(inner_blocks|layer_blocks)\.(\d)\.0", r"\1.\2", ours)
        name = name.replace("rpn.head.conv.0.0", "rpn.head.conv")
        for i in range(4):
            name = name.replace(f"mask_head.{i}.0", f"mask_head.mask_fcn{i + 1}")
        theirs[name] = tensor
    return theirs
