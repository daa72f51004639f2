"""Rules to convert weights of maskrcnn-benchmark and of its derivative, NVIDIA's Mask R-CNN."""

from torch import Tensor

from .caffe2 import legacy_conventions
from .layouts import box_rows_for_every_class, reverse_channels
from .origins import MAX_HEAD_CONVS, Rules, WeightsOrigin

_BOX, _MASK = r"roi_heads\.box\.feature_extractor", r"roi_heads\.mask\.feature_extractor"
_RULES: Rules = (
    (r"backbone\.body\.stem\.((?:conv1|bn1)\.\w+)", r"backbone.body.\1"),
    (r"backbone\.body\.layer[1-4]\.\d+\.(?:conv\d|bn\d|downsample\.[01])\.\w+", r"\g<0>"),
    (rf"(?:{_BOX}|{_MASK})\.head\.layer4\.(.+)", r"roi_heads.shared_head.\1"),
    *(
        rule
        for i in range(4)
        for kind in ("inner", "layer")
        for rule in (
            (rf"backbone\.fpn\.fpn_{kind}{i + 1}\.(\w+)", rf"backbone.fpn.{kind}_blocks.{i}.0.\1"),
            (
                rf"backbone\.fpn\.fpn_{kind}{i + 1}\.([01])\.(\w+)",
                rf"backbone.fpn.{kind}_blocks.{i}.\1.\2",
            ),
        )
    ),
    (r"rpn\.head\.conv\.(weight|bias)", r"rpn.head.conv.0.0.\1"),
    (r"rpn\.head\.(?:cls_logits|bbox_pred)\.\w+", r"\g<0>"),
    (rf"{_BOX}\.(fc6|fc7)\.(\w+)", r"roi_heads.box_head.\1.\2"),
    *(
        rule
        for i in range(MAX_HEAD_CONVS)
        for rule in (
            # Groups of three modules: convolution, group norm, activation.
            (rf"{_BOX}\.xconvs\.{3 * i}\.(\w+)", rf"roi_heads.box_head.{i}.0.\1"),
            (rf"{_BOX}\.xconvs\.{3 * i + 1}\.(\w+)", rf"roi_heads.box_head.{i}.1.\1"),
            (rf"{_MASK}\.mask_fcn{i + 1}\.(\w+)", rf"roi_heads.mask_head.{i}.0.\1"),
            (rf"{_MASK}\.mask_fcn{i + 1}\.([01])\.(\w+)", rf"roi_heads.mask_head.{i}.\1.\2"),
        )
    ),
    (r"roi_heads\.(box|mask)\.predictor\.(\w+\.\w+)", r"roi_heads.\1_predictor.\2"),
)


def _layout(tensors: dict[str, Tensor], _: object) -> dict[str, Tensor]:
    return reverse_channels(box_rows_for_every_class(tensors))


ORIGIN = WeightsOrigin(
    name="maskrcnn-benchmark",
    signature=r"backbone\.body\.stem\.conv1\.weight",
    rules=_RULES,
    ignored=r"rpn\.anchor_generator\..+|roi_heads\.keypoint\..+",
    layout=_layout,
    conventions=legacy_conventions,
)
