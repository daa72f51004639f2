"""Measurement of one training run in its own process: speed, memory, losses, AP."""

import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from ...model.bundle.manifest import Category
from ..common.processes import peak_memory_mib, reset_peak_memory
from ..common.timing import Latency, latency_from_seconds
from ..infer.gpu_time import GpuActivity, busy_microseconds, profile_gpu

# Torch and the training modules are imported only in the process of a run.
if TYPE_CHECKING:
    import torch

    from ...model.mask_rcnn import MaskRCNN
    from ...training.config import TrainConfig
    from ...training.distributed import Worker

TrainPrecision = Literal["fp32", "tf32", "fp16", "bf16"]
# Baselines: the configured model without compilation, and torchvision's model. `this` is the
# configured model itself.
TrainPeer = Literal["eager", "torchvision"]
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
    """Host time to launch a training step on a GPU, its number of kernels, and its NCCL time."""

    # Median time that the process needs to launch a step on an idle GPU.
    host_ms: float
    # Kernels, copies and fills of a step.
    kernels: int
    # Time in which NCCL's kernels run, waiting for other ranks included, and the part of it in
    # which the GPU does nothing else.
    communication_ms: float
    exposed_ms: float


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
    # Fraction of the time of the steps in which the process waited for the next batch.
    data_share: float
    # Seconds of the first step, with compilation.
    first_step_seconds: float
    # Launch time, kernels and communication of a step. None on a CPU.
    gpu: GpuSteps | None
    # On a GPU the peak reserved by torch, on the CPU the peak resident memory.
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
        ConfigError: GPU memory runs out.
    """
    os.environ.update(environment)
    import torch

    from ...training.config import ConfigError

    try:
        return _measure_steps(config, engine, settings)
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"{engine} in {config.precision} ran out of GPU memory at solver.images_per_batch="
            f"{config.solver.images_per_batch}; lower it"
        ) from None


def _measure_steps(
    config: "TrainConfig", engine: TrainEngine, settings: TrainSettings
) -> TrainResult:
    import torch

    from ...training.classes import set_classes_from_dataset
    from ...training.data.coco.dataset import CocoDataset
    from ...training.data.loading.device_batches import prefetch_batches
    from ...training.data.loading.loader import train_loader
    from ...training.distributed import worker
    from ...training.trainer import Trainer, set_arithmetic
    from ..common.torchvision_baseline import TorchvisionTrainer

    dataset = CocoDataset(config.data.train, config.data.on_broken)
    config = set_classes_from_dataset(dataset, config)
    with worker(config.device) as own:
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
        timer, waits, losses = _StepTimer(own.device), [], []
        for _ in range(settings.iterations):
            start = time.perf_counter()
            parts = list(itertools.islice(batches, config.solver.accumulate))
            waits.append(time.perf_counter() - start)
            losses.append(trainer.step(parts))
            timer.mark()
        first, *_ = all_seconds = timer.seconds()
        seconds = all_seconds[settings.warmup :]
        images = config.solver.images_per_batch
        metrics = {}
        if settings.with_average_precision:
            metrics = _average_precision(trainer.evaluated_model, config, dataset.categories, own)
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
            peak_memory_mib=torch.cuda.max_memory_reserved(own.device) / 2**20
            if own.device.type == "cuda"
            else peak_memory_mib("cpu"),
            losses=torch.stack(losses).tolist(),
            metrics=metrics,
        )


def _average_precision(
    model: "MaskRCNN", config: "TrainConfig", categories: Sequence[Category], worker: "Worker"
) -> dict[str, float]:
    """Return a model's COCO metrics on the validation set, with keys such as `segm/AP`."""
    from ...training.data.coco.dataset import CocoDataset
    from ...training.data.loading.loader import eval_loader
    from ...training.evaluation.evaluator import CocoEvaluator, evaluate_model
    from ...training.trainer import AUTOCAST_DTYPES

    assert config.data.val is not None
    dataset = CocoDataset(config.data.val, config.data.on_broken)
    evaluator = CocoEvaluator(dataset, categories, worker, config.evaluation.evaluator)
    batches = eval_loader(dataset, config, rank=worker.rank, world_size=worker.world_size)
    evaluate_model(model, batches, evaluator, worker.device, AUTOCAST_DTYPES.get(config.precision))
    return evaluator.evaluate()


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
    return GpuSteps(host_ms, len(activities), *communication_milliseconds(activities))


def communication_milliseconds(activities: Sequence[GpuActivity]) -> tuple[float, float]:
    """Return the NCCL time of a training step.

    Args:
        activities: GPU activities of a step, ordered by start time.

    Returns:
        Milliseconds in which NCCL kernels run, and those of them in which the GPU runs nothing
        else.
    """
    nccl = [activity for activity in activities if activity.name.startswith("nccl")]
    others = [activity for activity in activities if not activity.name.startswith("nccl")]
    exposed = busy_microseconds(activities) - busy_microseconds(others)
    return busy_microseconds(nccl) / 1000, exposed / 1000


class _StepTimer:
    """Timer of consecutive training steps. It does not synchronise with the GPU at each step."""

    def __init__(self, device: "torch.device") -> None:
        self._on_gpu = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self.mark()

    def mark(self) -> None:
        """Record the time at which all work submitted to the device so far is complete.

        On a GPU this enqueues an event, without waiting for the work.
        """
        if self._on_gpu:
            import torch

            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the seconds between each two consecutive times that `mark` recorded."""
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(self._events)]
        return [b - a for a, b in itertools.pairwise(self._times)]
