"""Choosing rows of whole batches at fixed shapes: gathering, and sampling for losses."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..plugins.stable_top_k import stable_top_k


def take_rows(rows: Tensor, indices: Tensor) -> Tensor:
    """Rows [B, N, ...] at indices [B, K]: [B, K, ...]."""
    shape = indices.shape + (1,) * (rows.dim() - 2)
    return rows.gather(1, indices.view(shape).expand(*indices.shape, *rows.shape[2:]))


def random_keys(seeds: Tensor, count: int, stream: int) -> Tensor:
    """Uniform numbers in [0, 1) that depend on seed, stream and position alone.

    A counter-based generator: an image draws the same numbers on any device, in any batch, on any
    rank, and resuming needs no generator state.

    Args:
        seeds: [B] int64, one an image.
        count: numbers an image.
        stream: distinguishes the uses of one seed.

    Returns:
        [B, count] float32.
    """
    positions = torch.arange(count, device=seeds.device)
    mixed = seeds[:, None] * 6364136223846793005 + positions * 2862933555777941757 + stream
    for shift, factor in ((31, -4658895280553007687), (27, -7723592293110705685), (33, 1)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return ((mixed >> 16) & 0xFFFFFF).float() / 2**24


class Sample(NamedTuple):
    """Candidates chosen for a loss: positives first, then negatives, then padding."""

    indices: Tensor
    """[B, S] int64."""
    positive: Tensor
    """[B, S] bool."""
    chosen: Tensor
    """[B, S] bool; False marks padding."""


def sample_candidates(
    positive: Tensor, negative: Tensor, keys: Tensor, size: int, positive_fraction: float
) -> Sample:
    """Choose at most `size` candidates of each image, of them at most a fraction positives.

    Args:
        positive: [B, N] bool.
        negative: [B, N] bool, disjoint from `positive`.
        keys: [B, N] in [0, 1), the random order.
        size: candidates an image; fewer where there are fewer.
        positive_fraction: largest share of positives; negatives fill what positives leave.
    """
    order = torch.where(positive, keys, -1.0)
    limit = min(int(size * positive_fraction), order.shape[1])
    picked = stable_top_k(order, limit)[1]
    picked_mask = torch.zeros_like(positive).scatter(1, picked, True) & positive
    order = torch.where(picked_mask, 2 + keys, torch.where(negative, keys, -1.0))
    values, indices = stable_top_k(order, min(size, order.shape[1]))
    return Sample(indices, values >= 2, values >= 0)
