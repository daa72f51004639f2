"""Mask R-CNN (He et al., 2017) as fixed shapes for a whole batch.

Nothing between images and detections waits for the device, loops over images or has a shape that
depends on what is seen. Given the same weights it computes what torchvision's
`maskrcnn_resnet50_fpn` computes, and its parameters have the same names.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .backbone import Backbone
from .config import ModelConfig
from .losses import LossTerms
from .roi_heads import RoiHeads
from .rpn import RegionProposalNetwork
from .targets import Targets


class Detections(NamedTuple):
    """What was found, best first; rows from `num_detections` on are zero."""

    num_detections: Tensor
    """[B] int64."""
    boxes: Tensor
    """[B, D, 4] float32, xyxy in input pixels."""
    scores: Tensor
    """[B, D] float32."""
    labels: Tensor
    """[B, D] int64; 1 is the first class."""
    masks: Tensor
    """[B, D, M, M] float32: probabilities within each box."""


class MaskRCNN(nn.Module):
    """Detects and segments the instances of `config.num_classes` classes."""

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config.backbone)
        self.rpn = RegionProposalNetwork(config, self.backbone.out_channels)
        self.roi_heads = RoiHeads(config, self.backbone.out_channels)
        self.register_buffer("pixel_mean", torch.tensor(config.pixel_mean), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(config.pixel_std), persistent=False)

    def forward(
        self,
        images: Tensor,
        image_sizes: Tensor,
        targets: Targets | None = None,
        seeds: Tensor | None = None,
    ) -> Detections | LossTerms:
        """Detections of a batch, or its losses where targets are given.

        Args:
            images: [B, 3, H, W] RGB in 0..255, any dtype; what lies outside an image is ignored.
            image_sizes: [B, 2] int64, height and width before padding.
            targets: ground truth, for the losses.
            seeds: [B] int64, what the sampling of each image depends on, for the losses.
        """
        if targets is None:
            return self.detect(images, image_sizes)
        if seeds is None:
            raise ValueError("losses need `seeds` beside `targets`")
        return self.losses(images, image_sizes, targets, seeds)

    def detect(self, images: Tensor, image_sizes: Tensor) -> Detections:
        """Detections of a batch; arguments as in `forward`."""
        features = self._features(images, image_sizes)
        proposals = self.rpn.propose(self.rpn(features, images.shape[2:]), image_sizes)
        found = self.roi_heads.detect(features, proposals, image_sizes)
        masks = self.roi_heads.draw_masks(features, found.boxes, found.labels).sigmoid()
        masks = masks * found.valid[..., None, None]
        return Detections(found.valid.sum(dim=1), found.boxes, found.scores, found.labels, masks)

    def losses(
        self, images: Tensor, image_sizes: Tensor, targets: Targets, seeds: Tensor
    ) -> LossTerms:
        """The five losses of a batch; arguments as in `forward`."""
        features = self._features(images, image_sizes)
        anchors = self.rpn(features, images.shape[2:])
        objectness, rpn_regression, num_anchors = self.rpn.losses(anchors, targets, seeds)
        with torch.no_grad():
            proposals = self.rpn.propose(anchors, image_sizes)
            rois = self.roi_heads.sample(proposals, targets, seeds)
        classification, regression, mask = self.roi_heads.losses(features, rois, targets)
        sums = torch.stack([objectness, rpn_regression, classification, regression, mask])
        num_rois, pixels = rois.chosen.sum(), rois.positive.sum() * self.config.mask_side**2
        counts = torch.stack([num_anchors, num_anchors, num_rois, num_rois, pixels])
        return LossTerms(sums, counts.float())

    def _features(self, images: Tensor, image_sizes: Tensor) -> list[Tensor]:
        """Maps of the normalised images, zero outside them, finest first."""
        mean, std = (x.float()[:, None, None] for x in (self.pixel_mean, self.pixel_std))
        height, width = image_sizes[:, :, None, None].unbind(dim=1)
        rows = torch.arange(images.shape[2], device=images.device)[:, None]
        columns = torch.arange(images.shape[3], device=images.device)
        inside = (rows < height[:, :, None]) & (columns < width[:, :, None])
        normalised = torch.where(inside, (images.float() - mean) / std, 0)
        weight = self.backbone.body.conv1.weight
        channels_last = weight.is_contiguous(memory_format=torch.channels_last)
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        normalised = normalised.to(weight.dtype, memory_format=memory_format)
        features: list[Tensor] = self.backbone(normalised)
        return features
