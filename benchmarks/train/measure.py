"""Measurement of training speed, memory and losses, by model, precision and random seed."""

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from ...model.bundle.manifest import Category
from ..common.gpu_time import communication_milliseconds, milliseconds_by_kind, profile_gpu
from ..common.machine import MatmulRoofline, measure_matmul_rooflines
from ..common.processes import (
    call_in_processes,
    iterate_in_process,
    peak_memory_mib,
    reset_peak_memory,
)
from ..common.timing import Latency, StepTimer, latency_from_seconds

# The command imports this file for its options. Torch and the training modules are therefore
# imported only by the functions that measure.
if TYPE_CHECKING:
    from ...model.mask_rcnn import MaskRCNN
    from ...training.config import TrainConfig
    from ...training.distributed import Worker

TrainPrecision = Literal["fp32", "tf32", "fp16", "bf16"]
# Baselines: the configured model without compilation, and torchvision's model.
TrainPeer = Literal["eager", "torchvision"]
# Model that a run trains: the configured model as it is (`this`), or a baseline.
TrainEngine = Literal["this"] | TrainPeer
# Number of steps whose launch time is measured.
_HOST_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of the training benchmark: precisions, baselines, seeds and numbers of steps."""

    precisions: Sequence[TrainPrecision]
    # Steps of each run.
    iterations: int = 100
    # Untimed first steps of each run.
    warmup: int = 10
    # Baselines to train too, in each precision.
    peers: Sequence[TrainPeer] = ()
    # Number of runs, with consecutive seeds, in each precision.
    seeds: int = 1
    # Whether to measure the average precision after each run.
    with_average_precision: bool = False


class GpuSteps(NamedTuple):
    """Kernels of a training step on a GPU: number, GPU time, and launch time on the host."""

    # Median time that the process needs to launch a step on an idle GPU.
    host_ms: float
    # Number of kernels, copies and memsets of a step.
    kernels: int
    # Time in which NCCL kernels run. It includes their wait for other ranks.
    communication_ms: float
    # Time by kind of kernel, with the keys `KERNEL_KINDS` and `IDLE`. `NCCL` is the part of
    # `communication_ms` in which the GPU does nothing else.
    kinds_ms: dict[str, float]


@dataclass(frozen=True)
class TrainResult:
    """Speed, memory and losses of one training run."""

    engine: TrainEngine
    precision: TrainPrecision
    seed: int
    device: str
    # Training processes, each with its own GPU.
    processes: int
    # Images per step, over all processes.
    batch: int
    iterations: int
    warmup: int
    # Throughput of the timed steps, including the wait for data.
    images_per_second: float
    # Latency of a step, including the wait for data.
    latency: Latency
    # Time of waiting for the next batch, as a fraction of the total time of the timed steps.
    data_share: float
    # Seconds of the first step, with compilation.
    first_step_seconds: float
    # Launch time, kernels and communication of a step. None on a CPU.
    gpu: GpuSteps | None
    # On a GPU: peak GPU memory reserved by torch. On a CPU: peak resident memory of the process.
    peak_memory_mib: float
    # [iterations, 5] in the order of `model.losses.LOSS_NAMES`, warm-up included.
    losses: Sequence[Sequence[float]]
    # Box and mask metrics on the validation set after the run. Empty: not measured.
    metrics: Mapping[str, float]

    @property
    def final_loss(self) -> float:
        """Mean of the total loss over the last tenth of the steps."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(map(sum, last)) / len(last)


def measure_training(
    config: "TrainConfig",
    settings: TrainSettings,
    on_run: Callable[[TrainEngine, TrainPrecision], object],
) -> Iterator[TrainResult]:
    """Train this project's model and the baselines in each precision with each seed.

    Every run uses new processes.

    Args:
        config: Configuration to train. `settings` replaces its precision, and sets the number of
            steps; the learning-rate schedule still follows `solver.max_iterations`. The runs have
            `settings.seeds` consecutive seeds, beginning with the key `seed`. The keys `device`
            and `processes` determine the number of processes of a run.
        settings: Precisions, baselines, seeds and numbers of steps.
        on_run: Function that is called before each run.

    Returns:
        Iterator that measures and yields one result per run. If a run has several processes, its
        result is that of rank 0.

    Raises:
        ConfigError: the configuration does not match the data, the machine or `settings`,
            torchvision has no model of this configuration, or GPU memory runs out.
        DataError: the data set is invalid.
        DivergenceError: the fp16 loss scale of a run became too small (`check_loss_scale`).
        ProcessError: a process of a run died.
    """
    from ...training.config import ConfigError
    from ...training.devices import number_of_processes

    try:
        processes = number_of_processes(config.device, config.processes)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if settings.with_average_precision and config.data.val is None:
        raise ConfigError(
            "--evaluate needs a validation set; set data.val, or leave out --evaluate"
        )
    if "torchvision" in settings.peers and processes > 1:
        raise ConfigError(
            f"torchvision's model can be trained by one process only, but this run has {processes} "
            "processes; leave out --peer torchvision"
        )
    return _measure_runs(config, settings, on_run, processes)


def _measure_runs(
    config: "TrainConfig",
    settings: TrainSettings,
    on_run: Callable[[TrainEngine, TrainPrecision], object],
    processes: int,
) -> Iterator[TrainResult]:
    seeds = range(config.seed, config.seed + settings.seeds)
    engines: tuple[TrainEngine, ...] = ("this", *settings.peers)
    for precision, engine, seed in itertools.product(settings.precisions, engines, seeds):
        on_run(engine, precision)
        run_config = _run_config(config, engine, precision, seed, settings.iterations)
        with _rank_environments(processes) as environments:
            ranks = [(run_config, engine, settings, environment) for environment in environments]
            first, *_ = call_in_processes(measure_rank, ranks)
        yield first


def measure_train_rooflines(
    config: "TrainConfig", precisions: Sequence[TrainPrecision]
) -> list[MatmulRoofline]:
    """For each precision, return the upper bound of one GPU's training speed.

    The bounds assume that a step has three times the convolutions and matrix products of inference:
    one third for the outputs, and two thirds for the gradients of inputs and weights. The images
    have the largest input size in the configuration. Without a GPU, return [].

    Raises:
        ProcessError: the measuring process died.
    """
    bucket = max(config.data.buckets, key=math.prod)
    detection = iterate_in_process(measure_matmul_rooflines, precisions, config.model, bucket)
    return [replace(one, flops_per_image=3 * one.flops_per_image) for one in detection]


@contextmanager
def _rank_environments(processes: int) -> Iterator[list[dict[str, str]]]:
    """Context manager: yield a list with one dict of environment variables per rank.

    The variables hold the rank, the number of ranks, and the address of a TCP store that connects
    the ranks. The store exists until the `with` block ends. If there is only one rank, its dict is
    empty, and there is no store.
    """
    if processes == 1:
        yield [{}]
        return
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from ...training.launcher import rank_environment

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield [rank_environment(rank, processes, store.port) for rank in range(processes)]


def _run_config(
    config: "TrainConfig",
    engine: TrainEngine,
    precision: TrainPrecision,
    seed: int,
    iterations: int,
) -> "TrainConfig":
    # A run may end before max_iterations. Do not lower max_iterations, because the learning-rate
    # schedule depends on it.
    longest = max(iterations, config.solver.max_iterations)
    solver = config.solver.model_copy(update={"max_iterations": longest})
    model = config.model
    if engine == "torchvision":  # torchvision needs masks of whole images, not crops
        roi = model.roi.model_copy(update={"mask_crop_size": None})
        model = model.model_copy(update={"roi": roi})
    changes = {"precision": precision, "seed": seed, "solver": solver, "model": model}
    if engine == "eager":
        changes["compile"] = False
    return config.model_copy(update=changes)


def measure_rank(
    config: "TrainConfig",
    engine: TrainEngine,
    settings: TrainSettings,
    environment: Mapping[str, str],
) -> TrainResult:
    """Train once in this process, as one rank, and return the measurement.

    Args:
        config: Configuration of the run.
        engine: Model to train: this project's, with or without compilation, or torchvision's.
        settings: Numbers of steps, and whether to measure the average precision.
        environment: Environment variables of the rank. Empty if this is the only process.

    Raises:
        ConfigError: GPU memory runs out, the configuration does not match the data or the machine,
            or torchvision has no model of this configuration.
        DataError: the data set is invalid.
        DivergenceError: the fp16 loss scale became too small (`check_loss_scale`). The message
            names the model and the seed.
    """
    os.environ.update(environment)
    import torch

    from ...training.config import ConfigError
    from ...training.reporting import DivergenceError
    from ...training.trainer import GpuMemoryError

    try:
        return _measure_steps(config, engine, settings)
    except DivergenceError as error:
        symptom, advice = error.args
        raise DivergenceError(
            f"model {engine!r} with seed={config.seed}: {symptom}", advice
        ) from None
    except (GpuMemoryError, torch.OutOfMemoryError):
        # `Trainer` raises the first of these errors, `TorchvisionTrainer` the second.
        raise ConfigError(
            f"model {engine!r} in {config.precision} ran out of GPU memory at "
            f"solver.images_per_batch={config.solver.images_per_batch}; lower this setting"
        ) from None


def _measure_steps(
    config: "TrainConfig", engine: TrainEngine, settings: TrainSettings
) -> TrainResult:
    import torch

    from ...training.classes import set_classes_from_dataset
    from ...training.data.coco.training_set import load_training_set
    from ...training.data.loading.device_batches import prefetch_batches
    from ...training.data.loading.loader import train_loader
    from ...training.distributed import worker
    from ...training.reporting import check_loss_scale
    from ...training.trainer import Trainer, set_arithmetic
    from ..common.torchvision_baseline import TorchvisionTrainer

    dataset = load_training_set(config.data)
    config = set_classes_from_dataset(dataset, config)
    with worker(config.device) as own:
        measure_metrics = None
        if settings.with_average_precision:  # find faults of the validation set before training
            measure_metrics = _validation(config, dataset.categories, own)
        set_arithmetic(config)
        trainer: Trainer | TorchvisionTrainer = (
            TorchvisionTrainer(config, own) if engine == "torchvision" else Trainer(config, own)
        )
        loader = train_loader(
            dataset,
            config,
            rank=own.rank,
            world_size=own.world_size,
            pin_memory=own.device.type == "cuda",
        )
        batches = prefetch_batches(own.device, loader)
        reset_peak_memory()
        timer, waits, losses = StepTimer(own.device), [], []
        for _ in range(settings.iterations):
            start = time.perf_counter()
            parts = list(itertools.islice(batches, config.solver.accumulate))
            waits.append(time.perf_counter() - start)
            losses.append(trainer.step(parts))
            timer.mark()
        check_loss_scale(trainer.scaler, settings.iterations)
        first, *_ = all_seconds = timer.seconds()
        seconds = all_seconds[settings.warmup :]
        images = config.solver.images_per_batch
        # Read the peak now, because the evaluation could raise it.
        peak_mib = peak_memory_mib("torch" if own.device.type == "cuda" else "cpu")
        metrics = {}
        if measure_metrics:
            if isinstance(trainer, Trainer):
                trainer.share_statistics()
            metrics = measure_metrics(trainer.evaluated_model)
        return TrainResult(
            engine=engine,
            precision=config.precision,
            seed=config.seed,
            device=own.device.type,
            processes=own.world_size,
            batch=images,
            iterations=settings.iterations,
            warmup=settings.warmup,
            images_per_second=images * len(seconds) / sum(seconds),
            latency=latency_from_seconds(seconds),
            data_share=sum(waits[settings.warmup :]) / sum(seconds),
            first_step_seconds=first,
            gpu=_gpu_steps(lambda: trainer.step(parts)) if own.device.type == "cuda" else None,
            peak_memory_mib=peak_mib,
            losses=torch.stack(losses).tolist(),
            metrics=metrics,
        )


def _validation(
    config: "TrainConfig", categories: Sequence[Category], worker: "Worker"
) -> Callable[["MaskRCNN"], dict[str, float]]:
    """Read the validation set. Return a function that measures a model's COCO metrics on it.

    The function returns the metrics with keys such as `segm/AP`.

    Args:
        config: Configuration of the run.
        categories: Classes of the model by label; label 1 is the first.
        worker: Rank of this process.

    Raises:
        ConfigError: the validation set has categories that the training set lacks.
        DataError: the validation set is missing or invalid.
    """
    from ...training.data.coco.categories import with_ids_of
    from ...training.data.coco.dataset import CocoDataset
    from ...training.data.loading.loader import eval_loader
    from ...training.evaluation.evaluator import CocoEvaluator, evaluate_model
    from ...training.trainer import AUTOCAST_DTYPES

    assert config.data.val is not None
    dataset = CocoDataset(config.data.val, config.data.on_broken)
    categories = with_ids_of(dataset, categories)

    def measure(model: "MaskRCNN") -> dict[str, float]:
        evaluator = CocoEvaluator(dataset, categories, worker, config.evaluation.evaluator)
        batches = eval_loader(dataset, config, rank=worker.rank, world_size=worker.world_size)
        dtype = AUTOCAST_DTYPES.get(config.precision)
        evaluate_model(model, batches, evaluator, worker.device, dtype)
        return evaluator.evaluate()

    return measure


def _gpu_steps(step: Callable[[], object]) -> GpuSteps:
    import torch

    starts = []

    def whole_step() -> None:
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        starts.append(time.perf_counter() - start)
        torch.cuda.synchronize()

    for _ in range(_HOST_STEPS):
        whole_step()
    host_ms = 1000 * statistics.median(starts)
    activities = profile_gpu(whole_step, count=1)
    communication_ms = communication_milliseconds(activities)
    kinds_ms = milliseconds_by_kind(activities)
    return GpuSteps(host_ms, len(activities), communication_ms, kinds_ms)
