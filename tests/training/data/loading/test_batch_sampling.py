from collections import Counter
from itertools import chain, pairwise

import pytest

from maskrcnn_trt.training.data.loading.sampling import (
    BatchPlan,
    GlobalBatches,
    TrainSampler,
    eval_plans,
)

BUCKETS = [0] * 13 + [1] * 7 + [2] * 1


def test_an_epoch_holds_every_image_and_one_bucket_a_batch() -> None:
    batches = GlobalBatches(BUCKETS, images_per_batch=4, seed=1)
    assert batches.batches_per_epoch == 4 + 2 + 1
    for epoch in range(3):
        plans = [batches[epoch * 7 + number] for number in range(7)]
        counts = Counter(chain.from_iterable(plan.indices for plan in plans))
        assert set(counts) == set(range(21))
        # 16, 8 and 4 places for 13, 7 and 1 images: each bucket's remainder is filled evenly.
        assert sorted(counts.values()) == [1] * (10 + 6) + [2] * (3 + 1) + [4]
        for plan in plans:
            assert len(plan.indices) == 4
            assert {BUCKETS[index] for index in plan.indices} == {plan.bucket}


def test_order_of_batches_mixes_buckets() -> None:
    """Without remainder, an epoch is a permutation."""
    batches = GlobalBatches([0, 1] * 64, images_per_batch=4, seed=0)
    order = [batches[iteration].bucket for iteration in range(32)]
    assert sum(a != b for a, b in pairwise(order)) > 5
    indices = [index for number in range(32) for index in batches[number].indices]
    assert sorted(indices) == list(range(128))


def test_order_depends_on_seed_and_epoch_alone() -> None:
    first, again = (GlobalBatches(BUCKETS, images_per_batch=4, seed=1) for _ in range(2))
    backwards = [again[iteration] for iteration in reversed(range(30))]
    assert [first[iteration] for iteration in range(30)] == backwards[::-1]
    assert first[0].indices != first[7].indices
    assert first[0].indices != GlobalBatches(BUCKETS, images_per_batch=4, seed=2)[0].indices


@pytest.mark.parametrize(("world_size", "parts"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)])
def test_ranks_and_parts_cut_the_same_global_batches(world_size: int, parts: int) -> None:
    batches = GlobalBatches(BUCKETS, images_per_batch=4, seed=3)
    samplers = [
        TrainSampler(batches, range(10), parts=parts, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert [len(sampler) for sampler in samplers] == [10 * parts] * world_size
    ranks = [list(sampler) for sampler in samplers]
    for iteration in range(10):
        slices: list[BatchPlan] = []
        for part in range(parts):
            slices += [plans[iteration * parts + part] for plans in ranks]
        positions = [s.position + i for s in slices for i in range(len(s.indices))]
        assert positions == list(range(4))
        assert tuple(chain.from_iterable(s.indices for s in slices)) == batches[iteration].indices
        assert {s.iteration for s in slices} == {iteration}


def test_resumed_sampler_continues_as_if_uninterrupted() -> None:
    batches = GlobalBatches(BUCKETS, images_per_batch=4, seed=3)
    whole = list(TrainSampler(batches, range(20), parts=2))
    assert list(TrainSampler(batches, range(13, 20), parts=2)) == whole[26:]


@pytest.mark.parametrize("world_size", [1, 2, 3, 20])
def test_evaluation_takes_every_image_once(world_size: int) -> None:
    plans = [
        plan
        for rank in range(world_size)
        for plan in eval_plans(BUCKETS, 4, rank=rank, world_size=world_size)
    ]
    assert sorted(chain.from_iterable(plan.indices for plan in plans)) == list(range(21))
    for plan in plans:
        assert {BUCKETS[index] for index in plan.indices} == {plan.bucket}
        assert 1 <= len(plan.indices) <= 4
