"""Model configuration. The defaults describe Mask R-CNN with ResNet-50 and a feature pyramid."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ..masks import MaskPaste

# Strides of the pyramid levels in input pixels. RoI features are pooled from all levels but the
# last.
PYRAMID_STRIDES = (4, 8, 16, 32, 64)
# Maximum number of boxes in one NMS on a GPU. This is a copy of `MAX_BOXES` in `plugins/nms_keep`,
# because importing that package imports torch.
_MAX_NMS_BOXES = 16384
# Limits far above all sensible values. A model with a typing error in such a number would need more
# memory than any machine has.
_MAX_WIDTH = 65536  # channels, width of a fully connected layer, or classes
_MAX_DEPTH = 64  # convolutions one after the other
_MAX_CELLS = 128  # cells of a pooled RoI, or samples of a cell, along a side
_MAX_MASK = 4096  # side of a cropped mask
_MAX_BOXES = 2**20  # candidates, proposals or detections per image

_Positive = Annotated[float, Field(gt=0)]


class FrozenConfig(BaseModel):
    """Immutable pydantic model. It rejects unknown keys, NaN and infinity."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class YamlConfig(FrozenConfig):
    """Immutable pydantic model of values from YAML. It rejects booleans in place of numbers."""

    @field_validator("*", mode="wrap")
    @classmethod
    def _check_booleans(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        result = validate(value)
        if _took_boolean(value, result):
            raise PydanticCustomError("number_type", "a boolean is not a number")
        return result


def _took_boolean(value: Any, validated: Any) -> bool:
    """Return whether pydantic converted a boolean in `value` to a number.

    In YAML, `yes` and `no` are booleans, too.
    """
    if isinstance(value, dict) and isinstance(validated, dict):
        return any(_took_boolean(item, validated.get(key, item)) for key, item in value.items())
    if isinstance(value, list) and isinstance(validated, tuple | list):
        return any(map(_took_boolean, value, validated))
    return isinstance(value, bool) and not isinstance(validated, bool)


class BackboneConfig(YamlConfig):
    """ResNet, and the feature maps that the region proposal network and the heads use."""

    name: Literal["resnet10", "resnet18", "resnet50", "resnet101"] = "resnet50"
    """Variant of ResNet. `resnet10` is `resnet18` with one block per stage instead of two."""
    features: Literal["fpn", "c4", "c5"] = "fpn"
    """Feature maps: `fpn`, a feature pyramid of strides 4 to 64; `c4`, the output of res4 (stride
    16), with res5 as the head of each RoI; `c5`, the output of a dilated res5 (stride 16)."""
    norm: Literal["frozen_bn", "bn", "gn"] = "frozen_bn"
    """Normalisation in the ResNet: frozen batch norm, batch norm, or group norm of 32 groups."""
    norm_eps: float = Field(1e-5, ge=0)
    """Epsilon that normalisations add to the variance."""
    stride_in_1x1: bool = False
    """Bottlenecks have their stride in the first 1x1 convolution, as in MSRA's ResNets.
    False: in the 3x3 convolution."""
    frozen_stages: int = Field(2, ge=0, le=5)
    """Number of ResNet stages that are not trained. 1: only the stem; 5: all stages up to res5."""
    fpn_channels: int = Field(256, ge=32, le=_MAX_WIDTH, multiple_of=32)
    """Channels of every pyramid level."""
    fpn_norm: Literal["none", "bn", "gn"] = "none"
    """Normalisation after the pyramid's convolutions."""


class AnchorConfig(YamlConfig):
    """Anchor boxes, at strides 4 to 64 of a pyramid or at stride 16 of a single map."""

    sizes: tuple[_Positive, ...] = Field((32, 64, 128, 256, 512), min_length=1)
    """Square roots of the anchors' areas in pixels: one per pyramid level. With `c4` or `c5`, the
    single map has anchors of all sizes."""
    aspect_ratios: tuple[_Positive, ...] = Field((0.5, 1.0, 2.0), min_length=1)
    """Aspect ratios of the anchors: height divided by width."""
    convention: Literal["torchvision", "detectron2", "legacy"] = "torchvision"
    """Rule for rounding and centring anchors: `torchvision` rounds sides to whole pixels,
    `detectron2` does not round, `legacy` is the rule of Faster R-CNN (2015) and maskrcnn-benchmark.
    On a single map, `detectron2` orders anchors by size first, the other rules by aspect ratio."""


class SamplingConfig(YamlConfig):
    """Matching of candidates (anchors or RoIs) to ground truth, and sampling for the losses."""

    foreground_iou: float = Field(ge=0, le=1)
    """A candidate of at least this IoU with a ground-truth box is positive."""
    background_iou: float = Field(ge=0, le=1)
    """A candidate below this IoU with every ground-truth box is negative."""
    batch_size_per_image: int = Field(ge=1)
    """Maximum number of candidates sampled per image."""
    positive_fraction: float = Field(gt=0, le=1)
    """Maximum share of positives in `batch_size_per_image`."""

    @model_validator(mode="after")
    def _check_order(self) -> "SamplingConfig":
        if self.background_iou > self.foreground_iou:
            raise ValueError("background_iou must not exceed foreground_iou")
        return self


class RpnSamplingConfig(SamplingConfig):
    """Matching and sampling of anchors for the losses."""

    foreground_iou: float = Field(0.7, ge=0, le=1)
    background_iou: float = Field(0.3, ge=0, le=1)
    batch_size_per_image: int = Field(256, ge=1, le=_MAX_BOXES)
    positive_fraction: float = Field(0.5, gt=0, le=1)


class RoiSamplingConfig(SamplingConfig):
    """Matching and sampling of RoIs for the losses."""

    foreground_iou: float = Field(0.5, ge=0, le=1)
    background_iou: float = Field(0.5, ge=0, le=1)
    batch_size_per_image: int = Field(512, ge=1, le=_MAX_BOXES)
    positive_fraction: float = Field(0.25, gt=0, le=1)


class RpnConfig(YamlConfig):
    """Settings of the region proposal network."""

    sampling: RpnSamplingConfig = RpnSamplingConfig()
    pre_nms_top_n_train: int = Field(2000, ge=1, le=_MAX_NMS_BOXES)
    """Maximum number of anchors per level that enter NMS in training, by descending score."""
    pre_nms_top_n_test: int = Field(1000, ge=1, le=_MAX_NMS_BOXES)
    """Maximum number of anchors per level that enter NMS in inference, by descending score."""
    post_nms_top_n_train: int = Field(2000, ge=1, le=_MAX_BOXES)
    """Maximum number of proposals per image in training."""
    post_nms_top_n_test: int = Field(1000, ge=1, le=_MAX_BOXES)
    """Maximum number of proposals per image in inference."""
    nms_iou: float = Field(0.7, gt=0, le=1)
    """IoU above which proposals of one level are suppressed."""
    min_side: float = Field(1e-3, ge=0)
    """Proposals with a side below this number of pixels are dropped."""
    conv_depth: int = Field(1, ge=1, le=_MAX_DEPTH)
    """Number of 3x3 convolutions before the score and delta predictors."""
    smooth_l1_beta: float = Field(1 / 9, ge=0)
    """Error at which the smooth L1 box loss changes from quadratic to linear; 0 is plain L1."""


class RoiConfig(YamlConfig):
    """Settings of the box and mask heads."""

    sampling: RoiSamplingConfig = RoiSamplingConfig()
    box_pool: int = Field(7, ge=1, le=_MAX_CELLS)
    """RoIAlign pools this number of cells per side for the box head."""
    box_head_convs: int = Field(0, ge=0, le=_MAX_DEPTH)
    """Number of 3x3 convolutions of the box head. One fully connected layer follows them.
    0: the box head consists of two fully connected layers."""
    box_head_dim: int = Field(1024, ge=1, le=_MAX_WIDTH)
    """Width of the box head's fully connected layers."""
    mask_pool: int = Field(14, ge=1, le=_MAX_CELLS)
    """RoIAlign pools this number of cells per side for the mask head. Predicted masks have twice as
    many samples per side; with `c4`, they have as many, rounded up to an even number."""
    mask_head_dim: int = Field(256, ge=1, le=_MAX_WIDTH)
    """Channels of the mask head."""
    mask_head_depth: int = Field(4, ge=1, le=_MAX_DEPTH)
    """Number of 3x3 convolutions of the mask head."""
    head_norm: Literal["none", "bn", "gn"] = "none"
    """Normalisation after the convolutions of the box and mask heads."""
    canonical_size: float = Field(224.0, gt=0)
    """Side in pixels of a RoI that is assigned to the level of stride 16 (Lin et al., eq. 1)."""
    sampling_ratio: int = Field(2, ge=0, le=_MAX_CELLS)
    """Number of bilinear samples per pooled cell along each axis. 0: the number of feature cells
    that the pooled cell spans, rounded up."""
    aligned: bool = False
    """Pool with the half-pixel shift of detectron2's ROIAlignV2."""
    mask_crop_size: int | None = Field(112, ge=14, le=_MAX_MASK)
    """Ground-truth masks are cropped to their boxes, and resized to this side in pixels.
    None: masks cover the whole input, and take a megabyte per instance."""
    smooth_l1_beta: float = Field(1 / 9, ge=0)
    """Error at which the smooth L1 box loss changes from quadratic to linear; 0 is plain L1."""
    min_side: float = Field(1e-2, ge=0)
    """Detections with a side below this number of pixels are dropped."""
    score_threshold: float = Field(0.05, ge=0, le=1)
    """Detections with a score at or below this threshold are dropped."""
    nms_iou: float = Field(0.5, gt=0, le=1)
    """IoU above which detections of one class are suppressed."""
    nms_candidates: int = Field(2000, ge=1, le=_MAX_NMS_BOXES)
    """Maximum number of detections per image, over all classes, that enter NMS, by descending
    score."""
    max_detections: int = Field(100, ge=1, le=_MAX_BOXES)
    """Maximum number of detections per image."""


class ModelConfig(YamlConfig):
    """Settings of a Mask R-CNN."""

    num_classes: int = Field(80, ge=1, le=_MAX_WIDTH)
    """Number of foreground classes. Label 0 is the background, label 1 the first class."""
    pixel_mean: tuple[float, float, float] = (123.675, 116.28, 103.53)
    """Mean of each RGB channel in 0..255."""
    pixel_std: tuple[_Positive, _Positive, _Positive] = (58.395, 57.12, 57.375)
    """Standard deviation of each RGB channel in 0..255."""
    inclusive_boxes: bool = False
    """Boxes include the pixels at their right and bottom edges, as in maskrcnn-benchmark: their
    width is x2 - x1 + 1."""
    mask_paste: MaskPaste = "torchvision"
    """Rule for resampling masks into an image: `torchvision` rounds boxes to whole pixels,
    `detectron2` uses the exact boxes."""
    backbone: BackboneConfig = BackboneConfig()
    anchors: AnchorConfig = AnchorConfig()
    rpn: RpnConfig = RpnConfig()
    roi: RoiConfig = RoiConfig()

    @model_validator(mode="after")
    def _check_features(self) -> "ModelConfig":
        backbone, sizes = self.backbone, self.anchors.sizes
        if backbone.features == "fpn" and len(sizes) != len(PYRAMID_STRIDES):
            raise ValueError(
                f"anchors.sizes has {len(sizes)} entries, but the pyramid has "
                f"{len(PYRAMID_STRIDES)} levels; give one size per level"
            )
        if backbone.features == "c5" and backbone.name in ("resnet10", "resnet18"):
            raise ValueError(
                f"backbone.features=c5 needs bottleneck blocks, which {backbone.name} lacks; use "
                "resnet50"
            )
        if self.roi.head_norm == "gn" and self.roi.mask_head_dim % 32:
            raise ValueError(
                f"roi.head_norm=gn needs a multiple of 32 as roi.mask_head_dim, not "
                f"{self.roi.mask_head_dim}"
            )
        if backbone.features == "c4" and (self.roi.box_head_convs or self.roi.head_norm != "none"):
            raise ValueError(
                "backbone.features=c4 uses the fifth stage of the ResNet as box head; remove "
                "roi.box_head_convs and roi.head_norm"
            )
        return self

    @property
    def mask_side(self) -> int:
        """Number of samples along each side of a predicted mask."""
        side = self.roi.mask_pool
        # With C4, the fifth stage halves the pooled features before the mask is upsampled.
        return 2 * ((side + 1) // 2) if self.backbone.features == "c4" else 2 * side
