"""Matching of anchors or RoIs to ground truth, and their seeded random sampling for the losses."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..plugins.match_boxes import match_boxes
from ..plugins.stable_top_k import stable_top_k
from .config.schema import SamplingConfig
from .targets import Targets


class Matches(NamedTuple):
    """Ground-truth matches of N candidates (anchors or RoIs) per image."""

    # [B, N] int64: index of the ground-truth box of highest IoU.
    target: Tensor
    # [B, N] bool.
    positive: Tensor
    # [B, N] bool. Candidates that are neither positive nor negative are not sampled.
    negative: Tensor


def match_candidates(
    candidates: Tensor, targets: Targets, config: SamplingConfig, *, low_quality: bool
) -> Matches:
    """Match candidates to ground-truth boxes by IoU (Ren et al., Faster R-CNN, section 3.1.2).

    Args:
        candidates: [N, 4] shared by all images, or [B, N, 4]; xyxy in input pixels.
        targets: ground truth. Its padding is not matched.
        config: the IoU thresholds.
        low_quality: whether the candidates of highest IoU with each ground-truth box are positive
            even if this IoU is below the foreground threshold. An IoU of 0 is never positive.
    """
    batched = candidates if candidates.dim() == 3 else candidates[None]
    thresholds = config.foreground_iou, config.background_iou
    return Matches(*match_boxes(targets.boxes, targets.labels, batched, *thresholds, low_quality))


def take_rows(rows: Tensor, indices: Tensor) -> Tensor:
    """Gather K of the N rows of each image: rows [B, N, ...], indices [B, K] -> [B, K, ...]."""
    shape = indices.shape + (1,) * (rows.dim() - 2)
    return rows.gather(1, indices.view(shape).expand(*indices.shape, *rows.shape[2:]))


def random_keys(seeds: Tensor, count: int, stream: int) -> Tensor:
    """Return uniform random numbers in [0, 1) from a counter-based generator.

    Args:
        seeds: [B] int64, one per image.
        count: numbers per image.
        stream: index of the random stream; streams with the same seed are independent.

    Returns:
        [B, count] float32.
    """
    # A number depends only on seed, stream and position: an image gets the same numbers on any
    # device, in any batch and on any rank, and resuming needs no generator state.
    positions = torch.arange(count, device=seeds.device)
    # The product equals seeds * 6364136223846793005 + positions * 2862933555777941757 modulo 2**64.
    # Add the seeds first: torch.compile would multiply the positions alone in 32 bits.
    mixed = (seeds[:, None] * 567062103879103985 + positions) * 2862933555777941757 + stream
    for shift, factor in ((31, -4658895280553007687), (27, -7723592293110705685), (33, 1)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    # Use 24 bits, as many as the significand of a float32 holds, so that no number is rounded to 1.
    return ((mixed >> 16) & 0xFFFFFF).float() / 2**24


class CandidateSample(NamedTuple):
    """S candidates per image sampled for a loss: positives, then negatives, then padding."""

    # [B, S] int64, indices into the candidates.
    indices: Tensor
    # [B, S] bool.
    positive: Tensor
    # [B, S] bool; False marks padding.
    chosen: Tensor


def sample_candidates(
    positive: Tensor, negative: Tensor, keys: Tensor, size: int, positive_fraction: float
) -> CandidateSample:
    """Sample up to `size` candidates per image at random, with a limited share of positives.

    Args:
        positive: [B, N] bool, candidates that can be sampled as positives.
        negative: [B, N] bool, candidates that can be sampled as negatives; none is in `positive`.
        keys: [B, N] in [0, 1); candidates with the highest keys are sampled.
        size: maximum number of sampled candidates per image.
        positive_fraction: positives are at most this share of `size`; negatives fill the rest.
    """
    order = torch.where(positive, keys, -1.0)
    limit = min(int(size * positive_fraction), order.shape[1])
    picked = stable_top_k(order, limit)[1]
    picked_mask = torch.zeros_like(positive).scatter(1, picked, True) & positive
    # Picked positives get keys from 2 to 3, negatives from 0 to 1, all others -1.
    order = torch.where(picked_mask, 2 + keys, torch.where(negative, keys, -1.0))
    values, indices = stable_top_k(order, min(size, order.shape[1]))
    return CandidateSample(indices, values >= 2, values >= 0)
