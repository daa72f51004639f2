"""Box and mask heads (He et al., Mask R-CNN) for whole batches."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.faster_rcnn import (
    FastRCNNConvFCHead,
    FastRCNNPredictor,
    TwoMLPHead,
)
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads

from ..plugins.box_deltas import decode_boxes, encode_boxes
from ..plugins.mask_targets import mask_targets_from_crops
from ..plugins.nms_keep import nms_keep
from ..plugins.pyramid_roi_align import pyramid_roi_align
from ..plugins.stable_top_k import stable_top_k
from .backbone import build_resnet, feature_strides, norm_layer
from .batch_norm import RoiBatchNorm2d, apply_head
from .config.schema import ModelConfig, RoiConfig
from .losses import smooth_l1_sum
from .rpn import Proposals
from .sampling import match_candidates, random_keys, sample_candidates, take_rows
from .targets import Targets

# Factors that multiply (dx, dy) and (dw, dh) in the regression targets.
_DELTA_WEIGHTS = 10.0, 5.0
# Random stream of `random_keys` for the sampling of RoIs. The sampling of anchors uses another
# stream, so that the two samplings are independent.
_SAMPLING_STREAM = 2
# log2 of 16, the stride of the map from which RoIs of `canonical_size` are pooled.
_CANONICAL_LEVEL = 4


class BoxDetections(NamedTuple):
    """Detections by descending score, without masks, padded to D = `max_detections` per image."""

    # [B, D, 4], xyxy in input pixels; zero for padding.
    boxes: Tensor
    # [B, D].
    scores: Tensor
    # [B, D] int64; 0 for padding.
    labels: Tensor
    # [B, D] bool; False marks padding.
    valid: Tensor


class TrainingRois(NamedTuple):
    """S RoIs per image sampled for the losses, positives first."""

    # [B, S, 4], xyxy in input pixels.
    boxes: Tensor
    # [B, S] int64; 0 is the background.
    labels: Tensor
    # [B, S] int64: index of the matched ground-truth box.
    targets: Tensor
    # [B, S] bool.
    positive: Tensor
    # [B, S] bool; False marks padding.
    chosen: Tensor


class MaskPredictor(nn.Module):
    """Last layers of the mask head, which predict one mask per RoI: that of the RoI's class."""

    def __init__(self, channels: int, dim: int, num_outputs: int) -> None:
        super().__init__()
        self.conv5_mask = nn.ConvTranspose2d(channels, dim, 2, stride=2)
        self.mask_fcn_logits = nn.Conv2d(dim, num_outputs, 1)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.kaiming_normal_(parameter, mode="fan_out", nonlinearity="relu")
            else:
                nn.init.zeros_(parameter)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return mask logits [K, 2P, 2P] of K RoIs with features [K, C, P, P] and labels [K]."""
        features = F.relu(self.conv5_mask(features))
        # Use `embedding`, not indexing: on a CPU, only the gradient of `embedding` is summed in a
        # fixed order.
        weight, bias = (
            F.embedding(labels, parameter.view(len(parameter), -1))[:, None]
            for parameter in self.mask_fcn_logits.parameters()
        )
        # Compute one matrix product per RoI. Order the factors so that the gradient has the memory
        # layout of the features.
        if features.is_contiguous():
            logits = torch.baddbmm(bias, weight, features.flatten(2))
        else:  # channels-last
            cells = features.permute(0, 2, 3, 1).flatten(1, 2)
            logits = torch.baddbmm(bias, cells, weight.mT)
        return logits.view(-1, *features.shape[2:])


class BoxHead(TwoMLPHead):  # type: ignore[misc]
    """Box head of two fully connected layers."""

    def forward(self, pooled: Tensor) -> Tensor:
        """Return hidden features [K, N] of K RoIs, from their pooled features [K, C, P, P]."""
        weight = self.fc6.weight
        if pooled.stride(1) == 1 and pooled.is_cuda:
            # The weights and the channels-last features have different orders. Reorder the weights,
            # which are smaller.
            weight = weight.unflatten(1, pooled.shape[1:]).permute(0, 2, 3, 1).flatten(1)
            pooled = pooled.permute(0, 2, 3, 1)
        hidden = F.relu(F.linear(pooled.flatten(1), weight, self.fc6.bias))
        return F.relu(self.fc7(hidden))


class RoiHeads(nn.Module):
    """Box and mask heads: classify and refine proposals, and predict masks of the detections.

    `shared_head` precedes both heads. With C4 features it is the ResNet's res5, else the identity.
    In all methods, `features` are the backbone's maps, finest first, and boxes are xyxy in input
    pixels.
    """

    def __init__(self, config: ModelConfig, channels: int) -> None:
        super().__init__()
        self.config = roi = config.roi
        self._shared_head_is_frozen = False
        self._inclusive = config.inclusive_boxes
        self._scales = tuple(1 / stride for stride in feature_strides(config.backbone)[:4])
        outputs = config.num_classes + 1
        if config.backbone.features == "c4":
            self.shared_head = build_resnet(config.backbone).layer4
            if config.backbone.frozen_stages == 5:
                self.freeze_shared_head()
            box_dim = mask_dim = 2 * channels
            box_head: nn.Module = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
            mask_head: nn.Module = nn.Identity()
        else:
            self.shared_head = nn.Identity()
            box_dim, mask_dim = roi.box_head_dim, roi.mask_head_dim
            box_head = _box_head(roi, channels)
            mask_dims = [mask_dim] * roi.mask_head_depth
            mask_head = MaskRCNNHeads(channels, mask_dims, 1, _norm_layer(roi))
        self.box_head = box_head
        self.box_predictor = FastRCNNPredictor(box_dim, outputs)
        self.mask_head = mask_head
        self.mask_predictor = MaskPredictor(mask_dim, roi.mask_head_dim, outputs)

    def freeze_shared_head(self) -> None:
        """Freeze weights and batch-norm statistics of `shared_head`."""
        self.shared_head.requires_grad_(False)
        self._shared_head_is_frozen = True
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode; a frozen `shared_head` remains in evaluation mode."""
        super().train(mode)
        if self._shared_head_is_frozen:
            self.shared_head.eval()
        return self

    def _pool(self, features: Sequence[Tensor], boxes: Tensor, size: int) -> Tensor:
        pooled: Tensor = pyramid_roi_align(
            features[: len(self._scales)],
            boxes,
            size,
            self.config.sampling_ratio,
            self._scales,
            _CANONICAL_LEVEL,
            self.config.canonical_size,
            self.config.aligned,
            self._inclusive,
        )
        shared: Tensor = self.shared_head(pooled.flatten(0, 1))
        return shared

    def _predict_boxes(
        self, features: Sequence[Tensor], boxes: Tensor, chosen: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return logits [B, R, C] and deltas [B, R, C, 4] of C classes for boxes [B, R, 4].

        Class 0 is the background. `chosen` [B, R] bool marks the boxes from which batch norm
        computes its statistics in training. None: all boxes.
        """
        pooled = self._pool(features, boxes, self.config.box_pool)
        hidden = apply_head(self.box_head, pooled, chosen)
        logits, deltas = self.box_predictor(hidden)
        shape = boxes.shape[:2]
        return logits.float().unflatten(0, shape), deltas.float().view(*shape, -1, 4)

    def detect(
        self, features: Sequence[Tensor], proposals: Proposals, image_sizes: Tensor
    ) -> BoxDetections:
        """Classify and refine proposals, apply class-wise NMS, keep the top-scoring detections.

        `image_sizes` [B, 2] holds heights and widths in pixels before padding. Boxes are clipped to
        these sizes.
        """
        config = self.config
        logits, deltas = self._predict_boxes(features, proposals.boxes)
        scores = logits.softmax(dim=-1)[..., 1:]
        found = (scores > config.score_threshold) & proposals.valid[..., None]
        scores = torch.where(found, scores, -1.0).flatten(1)
        scores, indices = stable_top_k(scores, config.nms_candidates)
        num_classes = logits.shape[-1] - 1
        rois, labels = indices // num_classes, indices % num_classes + 1
        boxes, large = decode_boxes(
            deltas,
            proposals.boxes,
            rois * (num_classes + 1) + labels,
            image_sizes,
            *_DELTA_WEIGHTS,
            self._inclusive,
            config.min_side,
        )
        valid = (scores > 0) & large
        classes = torch.where(valid, labels, -1)
        keep = nms_keep(boxes, classes, config.nms_iou, config.max_detections)
        scores, kept = stable_top_k(torch.where(keep, scores, -1.0), config.max_detections)
        valid = scores > 0
        detections = BoxDetections(
            take_rows(boxes, kept) * valid[..., None],
            scores * valid,
            labels.gather(1, kept) * valid,
            valid,
        )
        return BoxDetections(*(_padded_rows(rows, config.max_detections) for rows in detections))

    def predict_masks(
        self,
        features: Sequence[Tensor],
        boxes: Tensor,
        labels: Tensor,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Return M x M mask logits [B, K, M, M] float32 for boxes [B, K, 4] and labels [B, K].

        `chosen` [B, K] bool marks the boxes from which batch norm computes its statistics in
        training. None: all boxes.
        """
        pooled = self._pool(features, boxes, self.config.mask_pool)
        hidden = apply_head(self.mask_head, pooled, chosen)
        logits: Tensor = self.mask_predictor(hidden, labels.flatten())
        return logits.float().view(*labels.shape, *logits.shape[1:])

    def sample(self, proposals: Proposals, targets: Targets, seeds: Tensor) -> TrainingRois:
        """Sample RoIs for the losses, from proposals and ground-truth boxes together.

        `seeds` [B] int64 holds one random seed per image.
        """
        config = self.config.sampling
        boxes = torch.cat([proposals.boxes, targets.boxes], dim=1)
        valid = torch.cat([proposals.valid, targets.labels > 0], dim=1)
        matches = match_candidates(boxes, targets, config, low_quality=False)
        sample = sample_candidates(
            matches.positive & valid,
            matches.negative & valid,
            random_keys(seeds, boxes.shape[1], _SAMPLING_STREAM),
            config.batch_size_per_image,
            config.positive_fraction,
        )
        matched = matches.target.gather(1, sample.indices)
        return TrainingRois(
            take_rows(boxes, sample.indices),
            targets.labels.gather(1, matched) * sample.positive,
            matched,
            sample.positive,
            sample.chosen,
        )

    def losses(
        self, features: Sequence[Tensor], rois: TrainingRois, targets: Targets
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return classification, box and mask loss of sampled RoIs: three sums over the batch."""
        logits, deltas = self._predict_boxes(features, rois.boxes, rois.chosen)
        chosen = rois.chosen.float()
        classification = F.cross_entropy(
            logits.flatten(0, 1), rois.labels.flatten(), reduction="none"
        )
        classification = (classification * chosen.flatten()).sum()
        own_deltas = deltas.gather(2, rois.labels[..., None, None].expand(-1, -1, 1, 4))[:, :, 0]
        matched = take_rows(targets.boxes, rois.targets)
        wanted = encode_boxes(matched, rois.boxes, *_DELTA_WEIGHTS)
        regression = smooth_l1_sum(own_deltas, wanted, rois.positive, self.config.smooth_l1_beta)
        return classification, regression, self._mask_loss(features, rois, targets)

    def _mask_loss(
        self, features: Sequence[Tensor], rois: TrainingRois, targets: Targets
    ) -> Tensor:
        sampling = self.config.sampling
        # Positive RoIs come first, so the first `limit` RoIs include all of them.
        limit = int(sampling.batch_size_per_image * sampling.positive_fraction)
        boxes, labels, matched, positive = (x[:, :limit] for x in rois[:4])
        logits = self.predict_masks(features, boxes, labels, positive)
        if self.config.mask_crop_size is not None:
            owners = take_rows(targets.boxes, matched)
            boxes = boxes_within_crops(boxes, owners, self.config.mask_crop_size)
        # The index -1 gives empty targets to RoIs that are not positive.
        matched = torch.where(positive, matched, -1)
        wanted = mask_targets_from_crops(targets.masks, boxes, matched, logits.shape[-1])
        return F.binary_cross_entropy_with_logits(
            logits, wanted, weight=positive.float()[..., None, None], reduction="sum"
        )


def _padded_rows(rows: Tensor, count: int) -> Tensor:
    """Pad rows [B, K, ...] with zeros to at least `count` rows: [B, max(K, count), ...]."""
    missing = count - rows.shape[1]
    if missing <= 0:
        return rows
    return torch.cat([rows, rows.new_zeros(rows.shape[0], missing, *rows.shape[2:])], dim=1)


def _norm_layer(config: RoiConfig) -> Callable[[int], nn.Module] | None:
    return RoiBatchNorm2d if config.head_norm == "bn" else norm_layer(config.head_norm)


def _box_head(config: RoiConfig, channels: int) -> nn.Module:
    side, dim, convs = config.box_pool, config.box_head_dim, config.box_head_convs
    norm = _norm_layer(config)
    head: nn.Module = (
        FastRCNNConvFCHead((channels, side, side), [channels] * convs, [dim], norm)
        if convs
        else BoxHead(channels * side**2, dim)
    )
    return head


def boxes_within_crops(boxes: Tensor, owners: Tensor, side: int) -> Tensor:
    """Convert boxes from input pixels to pixels of their cropped ground-truth masks.

    Each mask was cropped to its ground-truth box and resized to `side` x `side` pixels.

    Args:
        boxes: [..., 4], xyxy in input pixels.
        owners: [..., 4], xyxy in input pixels, the ground-truth box that matches each box.
        side: height and width of the resized masks in pixels.
    """
    origins, sides = owners[..., :2], owners[..., 2:] - owners[..., :2]
    return (boxes - torch.cat([origins] * 2, dim=-1)) / torch.cat([sides] * 2, dim=-1) * side
