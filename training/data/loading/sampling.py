"""Select the images of each batch as a pure function of seed and iteration.

A run resumed at any iteration therefore has the same batches as an uninterrupted one, and the
global batches are the same for any number of ranks and accumulation steps.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from ..coco.dataset import ImageRecord


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
    """Sequence of global batches (images of all ranks), one per iteration.

    All images of a batch have the same shape bucket (input size).

    Without repeat factors, every image occurs once in each epoch. With repeat factors, the factor
    of an image is its average number of occurrences in an epoch. Each epoch shuffles the images of
    each bucket, and the batches. If the last batch of a bucket is not full, the first images of the
    bucket fill it, and occur again.
    """

    def __init__(
        self,
        buckets: Sequence[int],
        images_per_batch: int,
        seed: int,
        factors: NDArray[np.float64] | None = None,
    ) -> None:
        """Create the sequence of global batches (images of all ranks).

        Args:
            buckets: Index of the shape bucket of each image (at least one image).
            images_per_batch: Images per global batch.
            seed: Seed of the random order.
            factors: [n] average number of occurrences of each image in an epoch. None: each image
                occurs once. The sum of the factors of a bucket is rounded to a whole number.
        """
        self._buckets = np.asarray(buckets)
        self._images_per_batch = images_per_batch
        self._seed = seed
        self._factors = factors
        sizes = [self._size_of(bucket) for bucket in np.unique(self._buckets)]
        self.batches_per_epoch = sum(-(-size // images_per_batch) for size in sizes)
        self._epoch = lru_cache(maxsize=1)(self._shuffled_epoch)

    def __getitem__(self, iteration: int) -> BatchPlan:
        """Return the `BatchPlan` of an iteration's global batch. Iterations are counted from 0."""
        epoch, number = divmod(iteration, self.batches_per_epoch)
        indices = self._epoch(epoch)[number]
        return BatchPlan(int(self._buckets[indices[0]]), tuple(indices.tolist()), iteration)

    def _shuffled_epoch(self, epoch: int) -> list[NDArray[np.int64]]:
        rng = np.random.default_rng([self._seed, epoch])
        order = rng.permutation(len(self._buckets))
        batches: list[NDArray[np.int64]] = []
        for bucket in np.unique(self._buckets):
            members = order[self._buckets[order] == bucket]
            if self._factors is not None:
                members = self._repeated(members, self._size_of(bucket), rng)
            number = -(-len(members) // self._images_per_batch)
            filled = np.resize(members, (number, self._images_per_batch))
            batches.extend(filled)
        return [batches[i] for i in rng.permutation(len(batches))]

    def _size_of(self, bucket: int) -> int:
        """Return the number of images of a bucket (input size) in an epoch, with repetitions."""
        members = self._buckets == bucket
        if self._factors is None:
            return int(members.sum())
        return max(1, round(float(self._factors[members].sum())))

    def _repeated(
        self, members: NDArray[np.int64], size: int, rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """Return `size` image indices from `members` in random order, with repetitions.

        The average number of occurrences of an index is proportional to its repeat factor.
        """
        assert self._factors is not None
        # Use systematic sampling: each image occurs floor(factor) or ceil(factor) times, and all
        # epochs have the same length.
        ends = np.cumsum(self._factors[members])
        ends *= size / ends[-1]
        ends[-1] = size
        counts = np.diff(np.floor(ends + rng.random()), prepend=0).astype(np.int64)
        return rng.permutation(np.repeat(members, counts))


def repeat_factors(records: Sequence[ImageRecord], threshold: float | None) -> NDArray[np.float64]:
    """Return the average number of times that an epoch shows each image, [n].

    If `threshold` is None, the result is the `weight` of each record: 1, or the weight that
    `data.extra_train` gives to the image's data set. Otherwise, the result is the weight times the
    repeat factor of Gupta et al. (LVIS, 2019): max(1, sqrt(threshold / f)). Here, f is the share of
    all images that contain the image's rarest class.
    """
    weights = np.array([record.weight for record in records])
    if threshold is None:
        return weights
    labels = [{instance.label for instance in record.objects} for record in records]
    counts = Counter(chain.from_iterable(labels))
    rarest = np.array([min((counts[n] for n in own), default=len(records)) for own in labels])
    factors: NDArray[np.float64] = np.sqrt(threshold * len(records) / rarest).clip(1)
    return weights * factors


class TrainSampler(Sampler[BatchPlan]):
    """PyTorch `Sampler` of the images that one rank loads from each global batch.

    A global batch is split into `parts * world_size` contiguous slices, where `parts` is the number
    of accumulation steps. In accumulation step `n`, counted from 0, a rank loads slice
    `n * world_size + rank`.
    """

    def __init__(
        self,
        batches: GlobalBatches,
        iterations: range,
        *,
        parts: int,
        rank: int,
        world_size: int,
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
    buckets: Sequence[int], images_per_batch: int, *, rank: int, world_size: int
) -> list[BatchPlan]:
    """Return one rank's evaluation batches. Each image is in a batch of exactly one rank.

    Args:
        buckets: Index of each image's shape bucket (input size).
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
