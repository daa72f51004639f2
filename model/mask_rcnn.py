"""Mask R-CNN (He et al., 2017) that processes whole batches with fixed tensor shapes.

Detection never synchronises with the GPU and never loops over images. All tensor shapes are
independent of the images' content. With the same weights, results equal those of torchvision's
`maskrcnn_resnet50_fpn`, and the parameters have the same names.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .backbone import Backbone
from .config.schema import ModelConfig
from .losses import LossTerms
from .roi_heads import RoiHeads, TrainingRois
from .rpn import RegionProposalNetwork, TrainingAnchors
from .targets import Targets


class BatchDetections(NamedTuple):
    """Detections of B images by descending score, padded with zeros to D rows per image."""

    # [B] int64, number of rows that are not padding.
    num_detections: Tensor
    # [B, D, 4] float32, xyxy in input pixels.
    boxes: Tensor
    # [B, D] float32.
    scores: Tensor
    # [B, D] int64; 1 is the first class.
    labels: Tensor
    # [B, D, M, M] float32, M x M mask probabilities within each box.
    masks: Tensor


class TrainingSamples(NamedTuple):
    """Feature maps of a batch, and the anchors and RoIs sampled for its losses."""

    # One map [B, C, H_l, W_l] per pyramid level l, finest first.
    features: list[Tensor]
    anchors: TrainingAnchors
    rois: TrainingRois
    # [5] float32, see `LossTerms.counts`.
    counts: Tensor


class MaskRCNN(nn.Module):
    """Mask R-CNN: detects and segments instances of `config.num_classes` classes."""

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
    ) -> BatchDetections | LossTerms:
        """Return the detections of a batch, or its losses if targets are given.

        Args:
            images: [B, 3, H, W] RGB in 0..255, any dtype; pixels in the padding are ignored.
            image_sizes: [B, 2] int64, height and width in pixels before padding.
            targets: ground truth. None: return detections.
            seeds: [B] int64, seeds for the random sampling of anchors and RoIs. Required with
                targets.
        """
        if targets is None:
            return self.detect(images, image_sizes)
        if seeds is None:
            raise ValueError("the losses need the argument `seeds` as well as `targets`")
        return self.losses(images, image_sizes, targets, seeds)

    def detect(self, images: Tensor, image_sizes: Tensor) -> BatchDetections:
        """Return the detections of a batch.

        The arguments (padded images, and their sizes before padding) are those of `forward`.
        """
        features = self._features(images, image_sizes)
        proposals = self.rpn.propose(self.rpn(features, images.shape[2:]), image_sizes)
        found = self.roi_heads.detect(features, proposals, image_sizes)
        masks = self.roi_heads.predict_masks(features, found.boxes, found.labels).sigmoid()
        masks = masks * found.valid[..., None, None]
        return BatchDetections(
            found.valid.sum(dim=1), found.boxes, found.scores, found.labels, masks
        )

    def losses(
        self, images: Tensor, image_sizes: Tensor, targets: Targets, seeds: Tensor
    ) -> LossTerms:
        """Return the sums of a batch's losses, and the counts to divide them by.

        The arguments (padded images, their sizes before padding, ground truth, and random seeds)
        are those of `forward`.
        """
        samples = self.sample(images, image_sizes, targets, seeds)
        return LossTerms(self.loss_sums(samples, targets), samples.counts)

    def sample(
        self, images: Tensor, image_sizes: Tensor, targets: Targets, seeds: Tensor
    ) -> TrainingSamples:
        """Compute the feature maps of a batch, and sample anchors and RoIs for its losses.

        The arguments (padded images, their sizes before padding, ground truth, and random seeds)
        are those of `forward`.
        """
        height, width = images.shape[2:]
        maps = self.first_stages(images, image_sizes)
        return self.sample_from_maps(maps, (height, width), image_sizes, targets, seeds)

    def first_stages(self, images: Tensor, image_sizes: Tensor) -> list[Tensor]:
        """Normalise images, and return the maps of the ResNet's stages before `layer4`.

        The maps are ordered from fine to coarse. Without a pyramid, only the map of `layer3` is
        returned. The arguments (padded images, and their sizes before padding) are those of
        `forward`.
        """
        return self.backbone.first_stages(self.stem(images, image_sizes))

    def sample_from_maps(
        self,
        maps: list[Tensor],
        input_size: tuple[int, int],
        image_sizes: Tensor,
        targets: Targets,
        seeds: Tensor,
    ) -> TrainingSamples:
        """Compute the same result as the method `sample`, but from the output of `first_stages`.

        Args:
            maps: output of `first_stages`.
            input_size: height and width of the images in pixels, with padding.
            image_sizes: [B, 2] int64, height and width in pixels before padding.
            targets: ground truth of the batch.
            seeds: [B] int64, seeds for the random sampling.
        """
        features = self.backbone.last_stage(maps)
        with torch.no_grad():
            outputs = self.rpn(features, input_size)
            proposals = self.rpn.propose(outputs, image_sizes)
            rois = self.roi_heads.sample(proposals, targets, seeds)
            anchors = self.rpn.sample(outputs.anchors, targets, seeds)
            num_anchors, num_rois = anchors.chosen.sum(), rois.chosen.sum()
            pixels = rois.positive.sum() * self.config.mask_side**2
            counts = torch.stack([num_anchors, num_anchors, num_rois, num_rois, pixels])
        return TrainingSamples(features, anchors, rois, counts.float())

    def loss_sums(self, samples: TrainingSamples, targets: Targets) -> Tensor:
        """Return the sums [5] of a batch's losses over `samples`, in the order of `LOSS_NAMES`."""
        features, anchors, rois, _ = samples
        rpn_losses = self.rpn.losses(features, anchors, targets)
        return torch.stack([*rpn_losses, *self.roi_heads.losses(features, rois, targets)])

    def _features(self, images: Tensor, image_sizes: Tensor) -> list[Tensor]:
        """Normalise images, and return the backbone's feature maps, finest first."""
        return self.backbone.last_stage(self.first_stages(images, image_sizes))

    def stem(self, images: Tensor, image_sizes: Tensor) -> Tensor:
        """Normalise images, set their padding to 0, and return the output of the ResNet's stem.

        The arguments (padded images, and their sizes before padding) are those of `forward`.
        """
        mean, std = (x.float()[:, None, None] for x in (self.pixel_mean, self.pixel_std))
        height, width = image_sizes[:, :, None, None].unbind(dim=1)
        rows = torch.arange(images.shape[2], device=images.device)[:, None]
        columns = torch.arange(images.shape[3], device=images.device)
        inside = (rows < height[:, :, None]) & (columns < width[:, :, None])
        normalised = torch.where(inside, (images.float() - mean) / std, 0)
        weight = self.backbone.body.conv1.weight
        channels_last = weight.is_contiguous(memory_format=torch.channels_last)
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        return self.backbone.stem(normalised.to(weight.dtype, memory_format=memory_format))
