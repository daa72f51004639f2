"""Configuration of the model. Every default is the reference implementations' R-50-FPN."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class FrozenConfig(BaseModel):
    """A configuration section: immutable, and refusing keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class BackboneConfig(FrozenConfig):
    """Residual network and feature pyramid."""

    name: Literal["resnet18", "resnet50", "resnet101"] = "resnet50"
    """Residual network under the feature pyramid."""
    norm: Literal["frozen_bn", "bn", "gn"] = "frozen_bn"
    """Normalisation: batch norm with fixed statistics, batch norm, or group norm of 32 groups."""
    frozen_stages: int = Field(2, ge=0, le=5)
    """Stages that are not trained, counted from the stem."""
    fpn_channels: int = Field(256, ge=32, multiple_of=32)
    """Channels of every pyramid level."""


class AnchorConfig(FrozenConfig):
    """Anchor boxes; level l of the pyramid has stride 2**l pixels, from 4 to 64."""

    sizes: tuple[float, float, float, float, float] = (32, 64, 128, 256, 512)
    """Square root of an anchor's area in pixels, one a level."""
    aspect_ratios: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Height over width."""


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


class RoiConfig(FrozenConfig):
    """Box and mask heads."""

    sampling: RoiSamplingConfig = RoiSamplingConfig()
    box_pool: int = Field(7, ge=1)
    """Side of the pooled features of the box head."""
    box_head_dim: int = Field(1024, ge=1)
    """Width of the box head's two fully connected layers."""
    mask_pool: int = Field(14, ge=1)
    """Side of the pooled features of the mask head; masks have twice that side."""
    mask_head_dim: int = Field(256, ge=1)
    """Channels of the mask head."""
    mask_head_depth: int = Field(4, ge=1)
    """3x3 convolutions of the mask head."""
    canonical_size: float = Field(224.0, gt=0)
    """Side in pixels of a RoI that belongs on the level of stride 16 (Lin et al., eq. 1)."""
    sampling_ratio: int = Field(2, ge=1)
    """Bilinear samples a pooled cell and axis."""
    score_threshold: float = Field(0.05, ge=0, le=1)
    """Detections must score above this."""
    nms_iou: float = Field(0.5, gt=0, le=1)
    """Detections of one class that overlap more than this are suppressed."""
    nms_candidates: int = Field(2000, ge=1, le=16384)
    """Best-scoring candidates, over all classes, that enter the final NMS."""
    max_detections: int = Field(100, ge=1)
    """Detections an image at most."""


class ModelConfig(FrozenConfig):
    """Mask R-CNN with a feature pyramid."""

    num_classes: int = Field(80, ge=1)
    """Foreground classes; label 0 is the background, label 1 the first class."""
    pixel_mean: tuple[float, float, float] = (123.675, 116.28, 103.53)
    """Mean of each RGB channel in 0..255."""
    pixel_std: tuple[float, float, float] = (58.395, 57.12, 57.375)
    """Standard deviation of each RGB channel in 0..255."""
    backbone: BackboneConfig = BackboneConfig()
    anchors: AnchorConfig = AnchorConfig()
    rpn: RpnConfig = RpnConfig()
    roi: RoiConfig = RoiConfig()
