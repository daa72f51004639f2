from collections import Counter
from itertools import chain, pairwise
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from coco_folder import annotation, make_config, valid_content, write_folder

from maskrcnn_trt.training.config import ExtraDatasetConfig
from maskrcnn_trt.training.data.coco.dataset import CocoDataset, DataError
from maskrcnn_trt.training.data.coco.training_set import load_training_set
from maskrcnn_trt.training.data.loading.loader import train_loader
from maskrcnn_trt.training.data.loading.sampling import (
    BatchPlan,
    GlobalBatches,
    TrainSampler,
    eval_plans,
    repeat_factors,
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


def test_images_occur_by_their_factors() -> None:
    """Each epoch has the same length, and an image occurs floor or ceil of its factor times."""
    factors = np.array([1.0] * 12 + [2.7] + [0.25] * 6 + [5.5] + [3.0])
    batches = GlobalBatches(BUCKETS, 4, 1, factors)
    assert batches.batches_per_epoch == 4 + 2 + 1  # for 14.7, 7 and 3 images
    epochs = 200
    total: Counter[int] = Counter()
    for epoch in range(epochs):
        plans = [batches[epoch * 7 + number] for number in range(7)]
        counts = Counter(chain.from_iterable(plan.indices for plan in plans))
        # The last batch of a bucket is filled up with images that occur already.
        assert counts[12] in (2, 3, 4)
        assert counts[20] == 4
        total += counts
    assert total[12] / epochs == pytest.approx(2.7 * 16 / 14.7, rel=0.05)
    assert sum(total[i] for i in range(13, 19)) / epochs == pytest.approx(1.5 * 8 / 7, rel=0.1)
    again = GlobalBatches(BUCKETS, 4, 1, factors)
    assert [again[i] for i in reversed(range(21))] == [batches[i] for i in reversed(range(21))]


def test_repeat_factors_are_those_of_lvis(tmp_path: Path) -> None:
    content = valid_content()
    content["annotations"] = [
        *(annotation(n, image) for n, image in enumerate((2, 5, 8, 9))),
        annotation(8, 8, category_id=30),
        annotation(9, 11, category_id=30, iscrowd=1),
    ]
    dataset = CocoDataset(write_folder(tmp_path, content))
    # Category 7 is in 4 of 5 images, and 30 in one. Images 9 and 11 are the last.
    common, rare = max(1, sqrt(0.9 / 0.8)), max(1, sqrt(0.9 / 0.2))
    expected = [common, common, rare, common, 1]
    np.testing.assert_allclose(repeat_factors(dataset.records, 0.9), expected)
    np.testing.assert_array_equal(repeat_factors(dataset.records, None), np.ones(5))


def test_extra_training_sets_are_relabelled_and_weighted(tmp_path: Path) -> None:
    first = write_folder(tmp_path, valid_content())
    (tmp_path / "more").mkdir()
    content = valid_content()
    content["categories"] = [{"id": 30, "name": "thing"}]
    content["annotations"] = [annotation(1, 5, category_id=30)]
    more = write_folder(tmp_path / "more", content)
    extra = ExtraDatasetConfig(**more.model_dump(), weight=3)
    config = make_config(first, extra_train=(extra,), keep_empty=False)
    dataset = load_training_set(config.data)
    assert len(dataset) == 10
    assert [i.label for i in dataset.records[-4].instances] == [2]
    loader = train_loader(dataset, config)
    # Landscape: images 5 and 8, and three times image 5 of the other set.
    assert loader.iterations_per_epoch == 2 + 1
    shown = Counter(i for b in list(loader)[:3] for i in b.image_ids.tolist())
    assert (shown[2], shown[5] + shown[8]) == (4, 8)
    assert shown[5] >= 5
    content["categories"][0]["name"] = "other"
    write_folder(tmp_path / "more", content)
    with pytest.raises(DataError, match=r"category 30 'other'.*data merge"):
        load_training_set(config.data)
