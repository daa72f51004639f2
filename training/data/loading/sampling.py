"""Select the images of each batch as a pure function of seed and iteration.

A run resumed at any iteration therefore has the same batches as an uninterrupted one, and the
global batches are the same for any number of ranks and accumulation steps.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler


class BatchPlan(NamedTuple):
    """Indices of the images of one batch."""

    # Index of the images' shape bucket in `data.buckets`.
    bucket: int
    # Indices into `BatchReader.records`.
    indices: tuple[int, ...]
    # Training iteration, counted from 0.
    iteration: int = 0
    # Position of the first image within the global batch.
    position: int = 0


class GlobalBatches:
    """Sequence of the global batches (images of all ranks) by iteration. Each has one shape bucket.

    In each epoch, every image occurs once in random order. The last batch of a bucket is filled up
    with the bucket's first images. The order of the batches is random.
    """

    def __init__(self, buckets: Sequence[int], images_per_batch: int, seed: int) -> None:
        """Create the sequence.

        Args:
            buckets: Index of the shape bucket of each image (at least one image).
            images_per_batch: Images per global batch.
            seed: Seed of the random order.
        """
        self._buckets = np.asarray(buckets)
        self._images_per_batch = images_per_batch
        self._seed = seed
        counts = np.unique(self._buckets, return_counts=True)[1]
        self.batches_per_epoch = int(np.sum(-(-counts // images_per_batch)))
        self._epoch = lru_cache(maxsize=1)(self._shuffled_epoch)

    def __getitem__(self, iteration: int) -> BatchPlan:
        """Return the global batch of an iteration, counted from 0."""
        epoch, number = divmod(iteration, self.batches_per_epoch)
        indices = self._epoch(epoch)[number]
        return BatchPlan(int(self._buckets[indices[0]]), tuple(indices.tolist()), iteration)

    def _shuffled_epoch(self, epoch: int) -> list[NDArray[np.int64]]:
        rng = np.random.default_rng([self._seed, epoch])
        order = rng.permutation(len(self._buckets))
        batches: list[NDArray[np.int64]] = []
        for bucket in np.unique(self._buckets):
            members = order[self._buckets[order] == bucket]
            number = -(-len(members) // self._images_per_batch)
            filled = np.resize(members, (number, self._images_per_batch))
            batches.extend(filled)
        return [batches[i] for i in rng.permutation(len(batches))]


class TrainSampler(Sampler[BatchPlan]):
    """PyTorch `Sampler` of one rank's share of the global batches.

    A global batch is split into `parts * world_size` contiguous slices, where `parts` is the number
    of accumulation steps. A rank loads slice `part * world_size + rank` in its step `part`.
    """

    def __init__(
        self,
        batches: GlobalBatches,
        iterations: range,
        *,
        parts: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._batches = batches
        self._iterations = iterations
        self._parts = parts
        self._rank = rank
        self._world_size = world_size

    def __len__(self) -> int:
        return len(self._iterations) * self._parts

    def __iter__(self) -> Iterator[BatchPlan]:
        for iteration in self._iterations:
            plan = self._batches[iteration]
            size = len(plan.indices) // (self._parts * self._world_size)
            for part in range(self._parts):
                first = (part * self._world_size + self._rank) * size
                yield plan._replace(indices=plan.indices[first : first + size], position=first)


def eval_plans(
    buckets: Sequence[int], images_per_batch: int, *, rank: int = 0, world_size: int = 1
) -> list[BatchPlan]:
    """Return one rank's evaluation batches. Each image is in a batch of exactly one rank.

    Args:
        buckets: Index of each image's shape bucket.
        images_per_batch: Images per batch. The last batch of a bucket may have fewer.
        rank: Rank of this process.
        world_size: Number of ranks.
    """
    plans = []
    for bucket in sorted(set(buckets)):
        members = [index for index, own in enumerate(buckets) if own == bucket]
        plans += [
            BatchPlan(bucket, tuple(members[start : start + images_per_batch]))
            for start in range(0, len(members), images_per_batch)
        ]
    return plans[rank::world_size]
