"""Configuration of the model. Every default is the reference implementations' R-50-FPN."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .masks import MaskPaste

PYRAMID_STRIDES = (4, 8, 16, 32, 64)
"""Input pixels a cell of each pyramid level; RoIs are pooled from all but the last."""


class FrozenConfig(BaseModel):
    """A configuration section: immutable, and refusing keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class BackboneConfig(FrozenConfig):
    """Residual network, and which of its features the heads see."""

    name: Literal["resnet18", "resnet50", "resnet101"] = "resnet50"
    """Residual network."""
    features: Literal["fpn", "c4", "c5"] = "fpn"
    """What the heads see: a feature pyramid, the fourth stage with the fifth as the head of every
    RoI, or the fifth stage dilated. The last two have stride 16."""
    norm: Literal["frozen_bn", "bn", "gn"] = "frozen_bn"
    """Normalisation: batch norm with fixed statistics, batch norm, or group norm of 32 groups."""
    norm_eps: float = Field(1e-5, ge=0)
    """What normalisations add to the variance."""
    stride_in_1x1: bool = False
    """Bottlenecks halve the resolution in their first convolution, as in MSRA's networks, rather
    than in the 3x3 one."""
    frozen_stages: int = Field(2, ge=0, le=5)
    """Stages that are not trained, counted from the stem."""
    fpn_channels: int = Field(256, ge=32, multiple_of=32)
    """Channels of every pyramid level."""
    fpn_norm: Literal["none", "bn", "gn"] = "none"
    """Normalisation after the pyramid's convolutions."""


class AnchorConfig(FrozenConfig):
    """Anchor boxes: at strides 4 to 64 of a pyramid, or 16 of a single map."""

    sizes: tuple[float, ...] = Field((32, 64, 128, 256, 512), min_length=1)
    """Square root of an anchor's area in pixels: one a pyramid level, or all on the one map."""
    aspect_ratios: tuple[float, ...] = Field((0.5, 1.0, 2.0), min_length=1)
    """Height over width."""
    convention: Literal["torchvision", "detectron2", "legacy"] = "torchvision"
    """How corners are rounded, and on what point of a cell they are centred: torchvision rounds
    sides to whole pixels, detectron2 does not, legacy is Faster R-CNN's of 2015, which
    maskrcnn-benchmark kept. On one map, detectron2 orders anchors by size first, the others by
    ratio."""


class SamplingConfig(FrozenConfig):
    """Which candidates enter a loss."""

    foreground_iou: float = Field(ge=0, le=1)
    """A candidate of at least this IoU with a ground-truth box is positive."""
    background_iou: float = Field(ge=0, le=1)
    """A candidate below this IoU with every ground-truth box is negative."""
    batch_size_per_image: int = Field(ge=1)
    """Candidates sampled an image."""
    positive_fraction: float = Field(gt=0, le=1)
    """Largest share of positives among them."""

    @model_validator(mode="after")
    def _check_order(self) -> "SamplingConfig":
        if self.background_iou > self.foreground_iou:
            raise ValueError("background_iou must not exceed foreground_iou")
        return self


class RpnSamplingConfig(SamplingConfig):
    """Which anchors enter the losses."""

    foreground_iou: float = Field(0.7, ge=0, le=1)
    background_iou: float = Field(0.3, ge=0, le=1)
    batch_size_per_image: int = Field(256, ge=1)
    positive_fraction: float = Field(0.5, gt=0, le=1)


class RoiSamplingConfig(SamplingConfig):
    """Which RoIs enter the losses."""

    foreground_iou: float = Field(0.5, ge=0, le=1)
    background_iou: float = Field(0.5, ge=0, le=1)
    batch_size_per_image: int = Field(512, ge=1)
    positive_fraction: float = Field(0.25, gt=0, le=1)


class RpnConfig(FrozenConfig):
    """Region proposal network."""

    sampling: RpnSamplingConfig = RpnSamplingConfig()
    pre_nms_top_n_train: int = Field(2000, ge=1)
    """Anchors a level that are decoded in training."""
    pre_nms_top_n_test: int = Field(1000, ge=1)
    """Anchors a level that are decoded in inference."""
    post_nms_top_n_train: int = Field(2000, ge=1)
    """Proposals an image in training."""
    post_nms_top_n_test: int = Field(1000, ge=1)
    """Proposals an image in inference."""
    nms_iou: float = Field(0.7, gt=0, le=1)
    """Proposals of one level that overlap more than this are suppressed."""
    min_side: float = Field(1e-3, ge=0)
    """Proposals narrower or lower than so many pixels are dropped."""
    conv_depth: int = Field(1, ge=1)
    """3x3 convolutions of the head."""
    smooth_l1_beta: float = Field(1 / 9, ge=0)
    """Where the box loss turns from quadratic to linear; 0 makes it L1."""


class RoiConfig(FrozenConfig):
    """Box and mask heads."""

    sampling: RoiSamplingConfig = RoiSamplingConfig()
    box_pool: int = Field(7, ge=1)
    """Side of the pooled features of the box head."""
    box_head_convs: int = Field(0, ge=0)
    """3x3 convolutions of the box head. With any, one fully connected layer follows them; with
    none, two."""
    box_head_dim: int = Field(1024, ge=1)
    """Width of the box head's fully connected layers."""
    mask_pool: int = Field(14, ge=1)
    """Side of the pooled features of the mask head; masks have twice that side."""
    mask_head_dim: int = Field(256, ge=1)
    """Channels of the mask head."""
    mask_head_depth: int = Field(4, ge=1)
    """3x3 convolutions of the mask head."""
    head_norm: Literal["none", "bn", "gn"] = "none"
    """Normalisation after the convolutions of the box and mask heads."""
    canonical_size: float = Field(224.0, gt=0)
    """Side in pixels of a RoI that belongs on the level of stride 16 (Lin et al., eq. 1)."""
    sampling_ratio: int = Field(2, ge=0)
    """Bilinear samples a pooled cell and axis; 0 takes as many as there are feature cells."""
    aligned: bool = False
    """Pool with the half-pixel shift of detectron2's ROIAlignV2."""
    mask_crop_size: int | None = Field(112, ge=14)
    """Ground-truth masks are kept as crops of their boxes, of so many pixels a side; none, as masks
    of the whole input, which costs a megabyte an instance."""
    smooth_l1_beta: float = Field(1 / 9, ge=0)
    """Where the box loss turns from quadratic to linear; 0 makes it L1."""
    min_side: float = Field(1e-2, ge=0)
    """Detections narrower or lower than so many pixels are dropped."""
    score_threshold: float = Field(0.05, ge=0, le=1)
    """Detections must score above this."""
    nms_iou: float = Field(0.5, gt=0, le=1)
    """Detections of one class that overlap more than this are suppressed."""
    nms_candidates: int = Field(2000, ge=1, le=16384)
    """Best-scoring candidates, over all classes, that enter the final NMS."""
    max_detections: int = Field(100, ge=1)
    """Detections an image at most."""


class ModelConfig(FrozenConfig):
    """Mask R-CNN."""

    num_classes: int = Field(80, ge=1)
    """Foreground classes; label 0 is the background, label 1 the first class."""
    pixel_mean: tuple[float, float, float] = (123.675, 116.28, 103.53)
    """Mean of each RGB channel in 0..255."""
    pixel_std: tuple[float, float, float] = (58.395, 57.12, 57.375)
    """Standard deviation of each RGB channel in 0..255."""
    inclusive_boxes: bool = False
    """Boxes hold the pixels of their far edges, as in maskrcnn-benchmark: the legacy +1 width."""
    mask_paste: MaskPaste = "torchvision"
    """How masks are placed in an image: torchvision's rule works on boxes of whole pixels,
    detectron2's on the boxes as they are."""
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
                f"{len(PYRAMID_STRIDES)} levels"
            )
        if backbone.features == "c5" and backbone.name == "resnet18":
            raise ValueError(
                "backbone.features=c5 dilates bottlenecks, which resnet18 has not; use resnet50"
            )
        if backbone.features == "c4" and (self.roi.box_head_convs or self.roi.head_norm != "none"):
            raise ValueError(
                "backbone.features=c4 has the fifth stage as its head; leave out "
                "roi.box_head_convs and roi.head_norm"
            )
        return self

    @property
    def mask_side(self) -> int:
        """Side M of a mask in cells."""
        side = self.roi.mask_pool
        # The fifth stage, the head of C4, halves what was pooled before the mask is upsampled.
        return 2 * ((side + 1) // 2) if self.backbone.features == "c4" else 2 * side
