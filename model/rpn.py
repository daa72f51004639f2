"""Region proposal network (Ren et al., Faster R-CNN) for whole batches."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.rpn import RPNHead

from ..plugins.nms_keep import nms_keep
from ..plugins.stable_top_k import stable_top_k
from .anchors import cell_anchors, grid_anchors, grid_steps
from .backbone import feature_strides
from .boxes import DeltaWeights, boxes_from_deltas, clip_boxes, deltas_from_boxes, larger_than
from .config import ModelConfig
from .losses import smooth_l1_sum
from .matching import match_candidates
from .selection import random_keys, sample_candidates, take_rows
from .targets import Targets

DELTA_WEIGHTS = DeltaWeights(center=1.0, size=1.0)
_SAMPLING_STREAM = 1


class Proposals(NamedTuple):
    """Regions that may hold an object, best first."""

    boxes: Tensor
    """[B, R, 4], xyxy in input pixels, clipped to the image; zero where not valid."""
    valid: Tensor
    """[B, R] bool; False marks padding."""


class RpnOutputs(NamedTuple):
    """What the head says of every anchor, by map."""

    anchors: list[Tensor]
    """[N_l, 4]."""
    logits: list[Tensor]
    """[B, N_l] float32."""
    deltas: list[Tensor]
    """[B, N_l, 4] float32."""


class RegionProposalNetwork(nn.Module):
    """Scores and refines anchors, and keeps the best that do not overlap."""

    cell_anchors: Tensor

    def __init__(self, config: ModelConfig, channels: int) -> None:
        """Make the network for features of so many channels."""
        super().__init__()
        self.config = config.rpn
        self._anchor_config = config.anchors
        self._inclusive = config.inclusive_boxes
        self._strides = feature_strides(config.backbone)
        cells = cell_anchors(config.anchors, self._strides)
        self.register_buffer("cell_anchors", cells, persistent=False)
        self.head = RPNHead(channels, cells.shape[1], config.rpn.conv_depth)

    def forward(self, features: Sequence[Tensor], input_size: tuple[int, int]) -> RpnOutputs:
        """Outputs of [B, C, H_l, W_l] features of a padded input of (H, W) pixels."""
        logits, deltas = self.head(list(features))
        batch = features[0].shape[0]
        grid_sizes = [(f.shape[2], f.shape[3]) for f in features]
        steps = grid_steps(self._anchor_config, self._strides, input_size, grid_sizes)
        return RpnOutputs(
            grid_anchors(self.cell_anchors, steps, grid_sizes),
            [x.permute(0, 2, 3, 1).reshape(batch, -1).float() for x in logits],
            [
                x.unflatten(1, (-1, 4)).permute(0, 3, 4, 1, 2).reshape(batch, -1, 4).float()
                for x in deltas
            ],
        )

    def propose(self, outputs: RpnOutputs, image_sizes: Tensor) -> Proposals:
        """Proposals of each image; non-maximum suppression runs level by level."""
        pre_nms, post_nms = self._limits()
        width = min(pre_nms, max(len(anchors) for anchors in outputs.anchors))
        levels = [
            self._best_of_level(*level, image_sizes, width) for level in zip(*outputs, strict=True)
        ]
        boxes, scores = (torch.stack(parts, dim=1) for parts in zip(*levels, strict=True))
        classes = torch.where(scores.isfinite(), 0, -1)
        keep = nms_keep(boxes.flatten(0, 1), classes.flatten(0, 1), self.config.nms_iou, post_nms)
        scores = torch.where(keep.view_as(scores), scores, -torch.inf).flatten(1)
        scores, indices = stable_top_k(scores, post_nms)
        valid = scores.isfinite()
        return Proposals(take_rows(boxes.flatten(1, 2), indices) * valid[..., None], valid)

    def _limits(self) -> tuple[int, int]:
        c = self.config
        if self.training:
            return c.pre_nms_top_n_train, c.post_nms_top_n_train
        return c.pre_nms_top_n_test, c.post_nms_top_n_test

    def _best_of_level(
        self, anchors: Tensor, logits: Tensor, deltas: Tensor, image_sizes: Tensor, width: int
    ) -> tuple[Tensor, Tensor]:
        """Boxes [B, width, 4] and scores [B, width], best first; -inf marks padding."""
        scores, indices = stable_top_k(logits.detach(), width)
        boxes = boxes_from_deltas(
            take_rows(deltas.detach(), indices), anchors[indices], DELTA_WEIGHTS
        )
        boxes = clip_boxes(boxes, image_sizes, inclusive=self._inclusive)
        scores = torch.where(larger_than(boxes, self.config.min_side), scores, -torch.inf)
        missing = width - scores.shape[1]
        return F.pad(boxes, (0, 0, 0, missing)), F.pad(scores, (0, missing), value=-torch.inf)

    def losses(
        self, outputs: RpnOutputs, targets: Targets, seeds: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of the objectness and box losses, and the number of sampled anchors."""
        anchors = torch.cat(outputs.anchors)
        logits, deltas = torch.cat(outputs.logits, dim=1), torch.cat(outputs.deltas, dim=1)
        config = self.config.sampling
        matches = match_candidates(anchors, targets, config, low_quality=True)
        sample = sample_candidates(
            matches.positive,
            matches.negative,
            random_keys(seeds, len(anchors), _SAMPLING_STREAM),
            config.batch_size_per_image,
            config.positive_fraction,
        )
        objectness = F.binary_cross_entropy_with_logits(
            logits.gather(1, sample.indices),
            sample.positive.float(),
            weight=sample.chosen.float(),
            reduction="sum",
        )
        matched = take_rows(targets.boxes, matches.target.gather(1, sample.indices))
        regression = smooth_l1_sum(
            take_rows(deltas, sample.indices),
            deltas_from_boxes(matched, anchors[sample.indices], DELTA_WEIGHTS),
            sample.positive,
            self.config.smooth_l1_beta,
        )
        return objectness, regression, sample.chosen.sum()
