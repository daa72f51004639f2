"""Which images a batch holds: a pure function of seed and iteration.

Nothing here remembers what was drawn before, so a run resumed at an iteration continues as if it
had never stopped, and any number of ranks and accumulated parts sees the same global batches.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler


class BatchPlan(NamedTuple):
    """The images of one batch, before any of them is read."""

    bucket: int
    """Index of the shape bucket they all fit."""
    indices: tuple[int, ...]
    """Indices of the images."""
    iteration: int = 0
    """Training iteration, from 0."""
    position: int = 0
    """Place of the first image in the global batch."""


class GlobalBatches:
    """The global batch of every iteration: all images of an optimiser step, of one bucket.

    An epoch holds every image once, in random order; the last batch of a bucket is filled up
    with images from the start of that bucket's order. Batches of different buckets are mixed.
    """

    def __init__(self, buckets: Sequence[int], images_per_batch: int, seed: int) -> None:
        """Plan batches.

        Args:
            buckets: bucket index of each image; at least one image.
            images_per_batch: images of a global batch.
            seed: of the order.
        """
        self._buckets = np.asarray(buckets)
        self._images_per_batch = images_per_batch
        self._seed = seed
        counts = np.unique(self._buckets, return_counts=True)[1]
        self.batches_per_epoch = int(np.sum(-(-counts // images_per_batch)))
        self._epoch = lru_cache(maxsize=1)(self._shuffled_epoch)

    def __getitem__(self, iteration: int) -> BatchPlan:
        """The global batch of an iteration, counted from 0."""
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
    """One rank's part of every global batch, from an iteration on.

    The global batch is cut into `parts * world_size` contiguous slices; slice
    `part * world_size + rank` is the `part`-th of `parts` accumulated batches of a rank.
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
    """One rank's batches of an evaluation: over all ranks, every image once, in fixed order.

    Args:
        buckets: bucket index of each image.
        images_per_batch: images of a batch; the last one of a bucket may be smaller.
        rank: of this process.
        world_size: number of processes.
    """
    plans = []
    for bucket in sorted(set(buckets)):
        members = [index for index, own in enumerate(buckets) if own == bucket]
        plans += [
            BatchPlan(bucket, tuple(members[start : start + images_per_batch]))
            for start in range(0, len(members), images_per_batch)
        ]
    return plans[rank::world_size]
