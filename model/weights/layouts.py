"""Layouts of other implementations turned into ours: RGB, background first, a row a class."""

import re

import torch
from torch import Tensor

CLASS_SCORES = "roi_heads.box_predictor.cls_score"
BOX_DELTAS = "roi_heads.box_predictor.bbox_pred"
MASK_LOGITS = "roi_heads.mask_predictor.mask_fcn_logits"
STEM = "backbone.body.conv1.weight"

CLASS_ROWS = tuple(
    f"{layer}.{kind}"
    for layer in (CLASS_SCORES, BOX_DELTAS, MASK_LOGITS)
    for kind in ("weight", "bias")
)
"""Tensors whose first dimension depends on the number of classes."""


def reverse_channels(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors whose first convolution takes RGB where it took BGR, or the reverse."""
    return tensors | ({STEM: tensors[STEM].flip(1)} if STEM in tensors else {})


def background_first(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Class rows with the background first from detectron2's: last, or without any.

    Boxes and masks that all classes share are repeated, and those of the background, which nothing
    reads, are zero.
    """
    moved = dict(tensors)
    for kind in ("weight", "bias"):
        scores = tensors.get(f"{CLASS_SCORES}.{kind}")
        if scores is None:
            continue
        classes = len(scores) - 1
        moved[f"{CLASS_SCORES}.{kind}"] = scores.roll(1, dims=0)
        for layer, rows in ((BOX_DELTAS, 4), (MASK_LOGITS, 1)):
            own = tensors.get(f"{layer}.{kind}")
            if own is not None:
                own = torch.cat([own] * classes) if len(own) == rows else own
                moved[f"{layer}.{kind}"] = torch.cat([torch.zeros_like(own[:rows]), own])
    return moved


def box_rows_for_every_class(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Box rows of every class where background and foreground have one each."""
    moved = dict(tensors)
    for kind in ("weight", "bias"):
        scores, deltas = (tensors.get(f"{layer}.{kind}") for layer in (CLASS_SCORES, BOX_DELTAS))
        if scores is not None and deltas is not None and len(deltas) == 8:
            moved[f"{BOX_DELTAS}.{kind}"] = torch.cat(
                [deltas[:4]] + [deltas[4:]] * (len(scores) - 1)
            )
    return moved


def number_box_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the fully connected layer after convolutions named by its place in the sequence."""
    convs = sum(bool(re.fullmatch(r"roi_heads\.box_head\.\d+\.0\.weight", n)) for n in tensors)
    if not convs:
        return tensors
    # The flattening has a place too.
    place = f"roi_heads.box_head.{convs + 1}."
    return {n.replace("roi_heads.box_head.fc6.", place): t for n, t in tensors.items()}
