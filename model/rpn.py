"""Region proposal network (Ren et al., Faster R-CNN) for whole batches."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection.rpn import RPNHead

from ..plugins.box_deltas import decode_boxes, encode_boxes
from ..plugins.feature_patches import feature_patches
from ..plugins.grid_anchors import grid_anchors
from ..plugins.nms_keep import nms_keep
from ..plugins.runtime.feature_maps import map_sizes
from ..plugins.stable_top_k import stable_top_k, top_k_of_parts
from .anchors import cell_anchors, grid_steps
from .backbone import feature_strides
from .config.schema import ModelConfig
from .losses import smooth_l1_sum
from .sampling import match_candidates, random_keys, sample_candidates, take_rows
from .targets import Targets

# Factors that multiply (dx, dy) and (dw, dh) in the regression targets.
_DELTA_WEIGHTS = 1.0, 1.0
# Random stream of `random_keys` for the sampling of anchors. The sampling of RoIs uses another
# stream, so that the two samplings are independent.
_SAMPLING_STREAM = 1


class Proposals(NamedTuple):
    """Proposals of B images by descending score, padded to R rows per image."""

    # [B, R, 4], xyxy in input pixels, clipped to the image; zero for padding.
    boxes: Tensor
    # [B, R] bool; False marks padding.
    valid: Tensor


class RpnOutputs(NamedTuple):
    """RPN head outputs for B images and the N anchors of all feature maps, finest map first."""

    # [N, 4], xyxy in input pixels.
    anchors: Tensor
    # [B, N] float32, objectness.
    logits: Tensor
    # [B, N, 4] float32: dx, dy, dw, dh.
    deltas: Tensor
    # Number of anchors per feature map; the sum is N.
    counts: list[int]


class TrainingAnchors(NamedTuple):
    """S anchors per image sampled for the losses, positives first."""

    # [B, S, 4], xyxy in input pixels.
    boxes: Tensor
    # [B, S] int64, indices into `RpnOutputs.anchors`.
    indices: Tensor
    # [B, S] int64: index of the matched ground-truth box.
    targets: Tensor
    # [B, S] bool.
    positive: Tensor
    # [B, S] bool; False marks padding.
    chosen: Tensor


class RegionProposalNetwork(nn.Module):
    """Region proposal network: scores and refines anchors, and applies NMS to the proposals."""

    cell_anchors: Tensor

    def __init__(self, config: ModelConfig, channels: int) -> None:
        super().__init__()
        self.config = config.rpn
        self._anchor_config = config.anchors
        self._inclusive = config.inclusive_boxes
        self._strides = feature_strides(config.backbone)
        cells = cell_anchors(config.anchors, self._strides)
        self.register_buffer("cell_anchors", cells, persistent=False)
        self.head = RPNHead(channels, cells.shape[1], config.rpn.conv_depth)

    def forward(self, features: Sequence[Tensor], input_size: tuple[int, int]) -> RpnOutputs:
        """Return the outputs of the RPN head for all anchors of the feature maps.

        Args:
            features: one map [B, channels, H_l, W_l] per pyramid level l.
            input_size: height and width of the padded images in pixels.
        """
        logits, deltas = self.head(list(features))
        grid_sizes = map_sizes(features)
        steps = grid_steps(self._anchor_config, self._strides, input_size, grid_sizes)
        anchors = grid_anchors(self.cell_anchors, list(chain(*steps)), list(chain(*grid_sizes)))
        per_cell = self.cell_anchors.shape[1]
        return RpnOutputs(
            anchors,
            torch.cat([_by_anchor(x, 1) for x in logits], dim=1).float()[..., 0],
            torch.cat([_by_anchor(x, 4) for x in deltas], dim=1).float(),
            [per_cell * rows * columns for rows, columns in grid_sizes],
        )

    def propose(self, outputs: RpnOutputs, image_sizes: Tensor) -> Proposals:
        """Return the proposals of each image: the boxes of highest score after NMS.

        In each level, the anchors of highest score are decoded to boxes, and NMS is applied to
        these boxes. The remaining boxes of all levels then compete by score. Settings of
        `RpnConfig` limit the number of boxes before and after NMS. Boxes are clipped to
        `image_sizes` [B, 2], height and width in pixels before padding.
        """
        c = self.config
        pre_nms, post_nms = (
            (c.pre_nms_top_n_train, c.post_nms_top_n_train)
            if self.training
            else (c.pre_nms_top_n_test, c.post_nms_top_n_test)
        )
        pre_nms = min(pre_nms, max(outputs.counts))
        scores, indices = top_k_of_parts(outputs.logits.detach(), outputs.counts, pre_nms)
        boxes, large = decode_boxes(
            outputs.deltas.detach()[:, :, None],
            outputs.anchors[None],
            indices.flatten(1),
            image_sizes,
            *_DELTA_WEIGHTS,
            self._inclusive,
            c.min_side,
        )
        scores = torch.where(large.view_as(scores), scores, -torch.inf)
        by_map = boxes.view(-1, scores.shape[2], 4)
        classes = torch.where(scores.isfinite(), 0, -1).flatten(0, 1)
        keep = nms_keep(by_map, classes, c.nms_iou, post_nms)
        scores = torch.where(keep.view_as(scores), scores, -torch.inf).flatten(1)
        scores, chosen = stable_top_k(scores, post_nms)
        valid = scores.isfinite()
        return Proposals(take_rows(boxes, chosen) * valid[..., None], valid)

    def sample(self, anchors: Tensor, targets: Targets, seeds: Tensor) -> TrainingAnchors:
        """Sample anchors for the losses.

        `anchors` [N, 4] is `RpnOutputs.anchors`. `seeds` [B] holds one random seed per image.
        """
        config = self.config.sampling
        matches = match_candidates(anchors, targets, config, low_quality=True)
        sample = sample_candidates(
            matches.positive,
            matches.negative,
            random_keys(seeds, len(anchors), _SAMPLING_STREAM),
            config.batch_size_per_image,
            config.positive_fraction,
        )
        return TrainingAnchors(
            anchors[sample.indices],
            sample.indices,
            matches.target.gather(1, sample.indices),
            sample.positive,
            sample.chosen,
        )

    def losses(
        self, features: Sequence[Tensor], anchors: TrainingAnchors, targets: Targets
    ) -> tuple[Tensor, Tensor]:
        """Return objectness loss and box loss of sampled anchors: two sums over the batch.

        `features` holds one map [B, channels, H_l, W_l] per pyramid level l, as in `forward`.
        """
        logits, deltas = self._outputs_at(features, anchors.indices)
        objectness = F.binary_cross_entropy_with_logits(
            logits, anchors.positive.float(), weight=anchors.chosen.float(), reduction="sum"
        )
        matched = take_rows(targets.boxes, anchors.targets)
        wanted = encode_boxes(matched, anchors.boxes, *_DELTA_WEIGHTS)
        regression = smooth_l1_sum(deltas, wanted, anchors.positive, self.config.smooth_l1_beta)
        return objectness, regression

    def _outputs_at(self, features: Sequence[Tensor], indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of the RPN head for S anchors per image.

        Args:
            features: feature maps, as in `forward`.
            indices: [B, S] int64, indices of anchors in `RpnOutputs.anchors`.

        Returns:
            logits [B, S] and deltas [B, S, 4], as in `RpnOutputs`. Outputs and gradients are
                computed only from the cells around these anchors, not for the whole maps.
        """
        per_cell, batch = self.cell_anchors.shape[1], indices.shape
        cells, kinds = indices // per_cell, indices % per_cell
        *early, (last, _) = self.head.conv
        hidden = feature_patches(features, cells, len(early) + 1)
        for radius, (conv, _) in zip(range(len(early), 0, -1), early, strict=True):
            maps = hidden.flatten(0, 1).movedim(-1, 1)
            maps = F.conv2d(maps, conv.weight, conv.bias).relu()
            hidden = torch.unflatten(maps.movedim(1, -1), 0, batch)
            # Set cells outside of the map to 0, which is the convolutions' padding.
            inside = [feature.new_ones(len(feature), 1, *feature.shape[2:]) for feature in features]
            hidden = hidden * feature_patches(inside, cells, radius)
        # The last convolution computes a single cell per anchor, so it is a matrix product.
        kernel = last.weight.permute(0, 2, 3, 1).flatten(1)
        hidden = F.linear(hidden.flatten(2), kernel, last.bias).relu()
        logits, deltas = (
            torch.take_along_dim(
                F.linear(hidden, layer.weight.flatten(1), layer.bias)
                .float()
                .view(*batch, per_cell, values),
                kinds[..., None, None],
                dim=2,
            )[:, :, 0]
            for layer, values in ((self.head.cls_logits, 1), (self.head.bbox_pred, 4))
        )
        return logits[..., 0], deltas


def _by_anchor(output: Tensor, values: int) -> Tensor:
    """Reorder a feature map's RPN outputs by anchor: [B, A * V, H, W] becomes [B, H * W * A, V].

    Each of the A anchors of a cell has V = `values` outputs.
    """
    by_cell = torch.unflatten(output, 1, (-1, values)).permute(0, 3, 4, 1, 2)
    return by_cell.reshape(output.shape[0], -1, values)
