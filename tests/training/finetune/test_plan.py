import itertools
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tiny_run import fork_server
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from maskrcnn_trt.model.checkpoint import load_checkpoint
from maskrcnn_trt.model.config.overrides import values_by_key, with_overrides
from maskrcnn_trt.model.download.local_files import DownloadError
from maskrcnn_trt.model.weights.zoo import zoo_model
from maskrcnn_trt.training.config import TrainConfig
from maskrcnn_trt.training.data.coco.dataset import ImageRecord
from maskrcnn_trt.training.distributed import Worker, worker
from maskrcnn_trt.training.finetune import initial_weights
from maskrcnn_trt.training.finetune.initial_weights import DEFAULT_WEIGHTS, initial_checkpoint
from maskrcnn_trt.training.finetune.machine import Machine, common_machine
from maskrcnn_trt.training.finetune.plan import ImageStatistics, plan_finetuning
from maskrcnn_trt.training.launcher import rank_environment

CPU = Machine("cpu", 16_000_000_000, False, 2, 1)
GPU = Machine("cuda", 80_000_000_000, True, 16, 1)


@pytest.fixture(scope="module")
def resnet50() -> Any:
    return initial_checkpoint(None)


def test_other_weights_are_offered_if_the_download_fails() -> None:
    unreachable = patch.object(
        initial_weights, "read_reference", side_effect=DownloadError("x.pth")
    )
    with unreachable, pytest.raises(DownloadError, match=r"x\.pth; .*weights=FILE.*weights=null"):
        initial_checkpoint(DEFAULT_WEIGHTS)


def planned(
    images: ImageStatistics, start: Any, machine: Machine = GPU, *overrides: str
) -> TrainConfig:
    given = values_by_key(with_overrides({}, overrides))
    values = plan_finetuning(images, start, machine, given).values
    values["data"]["train"] = {"images": "images", "annotations": "a.json"}
    return TrainConfig.model_validate(with_overrides(values, overrides))


def images(count: int = 500, side: int = 1080, aspect: float = 1.5) -> ImageStatistics:
    return ImageStatistics(count, side, aspect)


@pytest.mark.parametrize("machine", [CPU, GPU, GPU._replace(memory=4_000_000_000, has_bf16=False)])
def test_plans_for_all_kinds_of_data_are_valid(resnet50: Any, machine: Machine) -> None:
    for count, side, aspect in itertools.product((1, 24, 3000, 200_000), (8, 480, 9000), (1, 9)):
        config = planned(images(count, side, aspect), resnet50, machine)
        solver, data = config.solver, config.data
        assert all(0 < step < solver.max_iterations for step in solver.steps)
        assert solver.warmup_iterations < solver.max_iterations
        assert data.max_size <= 1333
        assert data.min_size <= 2 * max(side, 16)
        assert config.precision != ("fp16" if machine is CPU else "fp32")


def test_larger_data_sets_get_more_steps_but_fewer_epochs(resnet50: Any) -> None:
    seen = []
    for count in (30, 300, 3000, 30_000):
        solver = planned(images(count), resnet50).solver
        seen.append(solver.max_iterations * solver.images_per_batch)
    assert seen == sorted(seen)
    epochs = [n / count for n, count in zip(seen, (30, 300, 3000, 30_000), strict=True)]
    assert epochs == sorted(epochs, reverse=True)
    assert 40 < epochs[0] < 110
    assert 5 < epochs[-1] < 12


def test_less_memory_gives_smaller_batches_and_then_smaller_images(resnet50: Any) -> None:
    plans = [
        planned(images(), resnet50, GPU._replace(memory=gigabytes * 10**9))
        for gigabytes in (80, 24, 12, 6, 4)
    ]
    batches = [plan.solver.images_per_batch for plan in plans]
    sizes = [plan.data.min_size for plan in plans]
    assert batches == sorted(batches, reverse=True)
    assert sizes == sorted(sizes, reverse=True)
    assert batches[0] >= 8 > batches[2] >= 1
    assert sizes[0] == 800 > sizes[-1] >= 256
    for plan, gigabytes in zip(plans, (80, 24, 12, 6, 4), strict=True):
        pixels = max(b.height * b.width for b in plan.data.buckets) * plan.solver.images_per_batch
        # 3 kB per pixel in 16-bit arithmetic, and 2 GB for weights and libraries
        assert 3e3 * pixels + 2e9 < gigabytes * 1e9


def test_square_images_have_one_bucket_and_small_images_are_little_enlarged(resnet50: Any) -> None:
    square = planned(images(aspect=1.0), resnet50).data
    assert [tuple(bucket) for bucket in square.buckets] == [(800, 800)]
    assert planned(images(side=200), resnet50).data.min_size == 384


def test_a_cpu_gets_a_short_run_on_small_images(resnet50: Any) -> None:
    config = planned(images(), resnet50, CPU)
    assert config.data.min_size == 320
    assert config.solver.max_iterations * config.solver.images_per_batch <= 500
    assert config.model.roi.sampling.batch_size_per_image == 64
    assert config.model.rpn.post_nms_top_n_test == 300
    assert planned(images(), resnet50).model.rpn.post_nms_top_n_test == 1000


def test_a_small_model_gets_its_own_input_size_and_more_steps_on_a_cpu(
    tiny_checkpoint: Path, resnet50: Any
) -> None:
    tiny = load_checkpoint(tiny_checkpoint)
    small = planned(images(), tiny, CPU)
    assert (small.data.min_size, small.data.max_size) == (96, 144)
    assert small.solver.max_iterations > 5 * planned(images(), resnet50, CPU).solver.max_iterations
    assert small.model.backbone.norm == "frozen_bn"
    assert "num_classes" not in small.model.model_fields_set


def test_batches_are_divisible_by_the_number_of_processes(resnet50: Any) -> None:
    for processes in (2, 3, 8):
        solver = planned(images(), resnet50, GPU._replace(processes=processes)).solver
        assert solver.images_per_batch % processes == 0


def test_other_values_are_fitted_to_those_that_are_set(resnet50: Any) -> None:
    default = planned(images(), resnet50)
    batch = planned(images(), resnet50, GPU, "solver.images_per_batch=4")
    ratio = default.solver.images_per_batch / 4
    assert batch.solver.max_iterations == pytest.approx(default.solver.max_iterations * ratio, 0.01)
    assert batch.solver.base_lr == pytest.approx(default.solver.base_lr / ratio**0.5, 0.05)
    short = planned(images(), resnet50, GPU, "solver.max_iterations=50").solver
    assert (short.max_iterations, short.steps, short.warmup_iterations) == (50, (35, 45), 5)
    sized = planned(images(), resnet50, GPU, "data.min_size=400").data
    assert (sized.max_size, [tuple(b) for b in sized.buckets]) == (600, [(416, 608), (608, 416)])


@pytest.mark.parametrize(
    ("overrides", "sides", "batch"),
    [
        (("data.max_size=100",), (96, 100), 16),
        (("data.buckets=[[128,128]]",), (128, 128), 16),
        (("data.buckets=[[480,640],[640,480]]",), (480, 640), 16),
        (("data.buckets=[[480,640],[640,480],[512,512]]", "data.max_size=600"), (480, 600), 16),
        (("data.buckets=[[480,640],[640,480]]", "data.min_size=320"), (320, 480), 16),
        (("solver.accumulate=3",), (800, 1200), 12),
        (("solver.accumulate=32",), (800, 1200), 32),
    ],
)
def test_sizes_and_batch_are_fitted_to_limits_that_are_set(
    resnet50: Any, overrides: tuple[str, ...], sides: tuple[int, int], batch: int
) -> None:
    config = planned(images(), resnet50, GPU, *overrides)
    assert (config.data.min_size, config.data.max_size) == sides
    assert config.solver.images_per_batch == batch


def test_statistics_are_those_of_the_images() -> None:
    sizes = [(480, 640)] * 12 + [(640, 480)] * 9 + [(100, 800)]
    records = [ImageRecord(n, Path("a"), *size, ()) for n, size in enumerate(sizes)]
    statistics = ImageStatistics.of(records)
    assert (statistics.count, statistics.shorter_side) == (22, 480)
    assert statistics.aspect == pytest.approx(4 / 3)


def test_the_machine_has_memory_and_cores() -> None:
    machine = common_machine(Worker(0, 1, torch.device("cpu")))
    assert machine.device == "cpu"
    assert 10**8 < machine.memory < 10**14
    assert machine.cores >= 1


def _common_machine(rank: int, port: int) -> Machine:
    """Return the result of `common_machine` on a rank with `8 - rank` GB of free memory."""
    os.environ.update(rank_environment(rank, 2, port))
    memory = patch(f"{common_machine.__module__}.available_memory", return_value=(8 - rank) * 10**9)
    with memory, worker("cpu") as own:
        return common_machine(own)


@pytest.mark.slow
def test_all_ranks_plan_for_the_least_free_memory() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ProcessPoolExecutor(2, fork_server()) as pool:
        machines = list(pool.map(_common_machine, range(2), [store.port] * 2))
    assert machines[0] == machines[1]
    assert machines[0].memory == 3.5e9


def test_the_default_weights_are_published() -> None:
    assert zoo_model(DEFAULT_WEIGHTS).dataset == "COCO"
