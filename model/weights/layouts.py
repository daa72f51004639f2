"""Conversion of weights to this model's layout: RGB input, background as the first class."""

import re

import torch
from torch import Tensor

CLASS_SCORES = "roi_heads.box_predictor.cls_score"
BOX_DELTAS = "roi_heads.box_predictor.bbox_pred"
MASK_LOGITS = "roi_heads.mask_predictor.mask_fcn_logits"
STEM = "backbone.body.conv1.weight"

# Tensors whose first dimension depends on the number of classes.
CLASS_ROWS = tuple(
    f"{layer}.{kind}"
    for layer in (CLASS_SCORES, BOX_DELTAS, MASK_LOGITS)
    for kind in ("weight", "bias")
)


def reverse_channels(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Reverse the first convolution's input channels, from BGR to RGB or from RGB to BGR."""
    return tensors | ({STEM: tensors[STEM].flip(1)} if STEM in tensors else {})


def background_first(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Reorder the classes in tensors of detectron2's predictors, so that background comes first.

    detectron2's class scores have the background in the last row. Its box deltas and mask logits
    have no rows for the background. In this model, all three begin with the background. If box
    deltas or mask logits are class-agnostic, they are repeated for every class.
    """
    moved = dict(tensors)
    for kind in ("weight", "bias"):
        scores = tensors.get(f"{CLASS_SCORES}.{kind}")
        if scores is None:
            continue
        classes = len(scores) - 1
        moved[f"{CLASS_SCORES}.{kind}"] = scores.roll(1, dims=0)
        for layer, size in ((BOX_DELTAS, 4), (MASK_LOGITS, 1)):
            rows = tensors.get(f"{layer}.{kind}")
            if rows is not None:
                rows = torch.cat([rows] * classes) if len(rows) == size else rows
                # Rows of the background are never read, so fill them with zeros.
                moved[f"{layer}.{kind}"] = torch.cat([torch.zeros_like(rows[:size]), rows])
    return moved


def box_rows_for_every_class(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """If box deltas are class-agnostic, repeat their foreground rows for every class.

    In files of Caffe2's Detectron and of maskrcnn-benchmark, class-agnostic deltas have 8 rows: 4
    for the background, then 4 for all other classes.
    """
    moved = dict(tensors)
    for kind in ("weight", "bias"):
        scores, deltas = (tensors.get(f"{layer}.{kind}") for layer in (CLASS_SCORES, BOX_DELTAS))
        if scores is not None and deltas is not None and len(deltas) == 8:
            moved[f"{BOX_DELTAS}.{kind}"] = torch.cat(
                [deltas[:4]] + [deltas[4:]] * (len(scores) - 1)
            )
    return moved


def number_box_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """If the box head begins with convolutions, rename `fc6` to its index among the head's modules.

    torchvision's `FastRCNNConvFCHead` uses these indices as the names of its modules.
    """
    convs = sum(bool(re.fullmatch(r"roi_heads\.box_head\.\d+\.0\.weight", n)) for n in tensors)
    if not convs:
        return tensors
    # Between the convolutions and `fc6`, the module that flattens has an index too.
    layer = f"roi_heads.box_head.{convs + 1}."
    return {n.replace("roi_heads.box_head.fc6.", layer): t for n, t in tensors.items()}
