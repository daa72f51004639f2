"""A training run that is measured, in a process that it has for itself."""

import itertools
import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..training.classes import with_classes_of
from ..training.config import ConfigError, TrainConfig
from ..training.data.batches import Batch
from ..training.data.coco import CocoDataset
from ..training.data.device_batches import batches_on
from ..training.data.loader import train_loader
from ..training.distributed import worker
from ..training.trainer import Trainer, set_arithmetic
from .latency import latency_from_seconds
from .memory import peak_memory_mib, reset_peak_memory
from .torchvision_training import TorchvisionTrainer
from .train import Engine, TrainPrecision, TrainResult, TrainSettings


class _Steps(Protocol):
    def step(self, batches: Sequence[Batch]) -> Tensor: ...


def measure_run(
    config: TrainConfig, engine: Engine, precision: TrainPrecision, settings: TrainSettings
) -> TrainResult:
    """Train once.

    Raises:
        ConfigError: as `measure_training`, and if the memory of the GPU does not suffice.
        DataError: the data cannot be used.
    """
    try:
        return _measure(
            _config_for(config, engine, precision, settings.iterations), engine, settings
        )
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"{engine} in {precision} ran out of GPU memory at solver.images_per_batch="
            f"{config.solver.images_per_batch}; lower it"
        ) from None


def _measure(config: TrainConfig, engine: Engine, settings: TrainSettings) -> TrainResult:
    dataset = CocoDataset(config.data.train, config.data.on_broken)
    config = with_classes_of(dataset, config)
    with worker(config.device) as own:
        set_arithmetic(config)
        trainer: _Steps = (Trainer if engine == "this" else TorchvisionTrainer)(config, own)
        loader = train_loader(dataset, config, pin_memory=own.device.type == "cuda")
        batches = batches_on(own.device, loader)
        _reset_peak_memory(own.device)
        clock, waits, losses = _Clock(own.device), [], []
        for _ in range(settings.iterations):
            start = time.perf_counter()
            parts = list(itertools.islice(batches, config.solver.accumulate))
            waits.append(time.perf_counter() - start)
            losses.append(trainer.step(parts))
            clock.mark()
        seconds = clock.seconds()[settings.warmup :]
        images = config.solver.images_per_batch
        return TrainResult(
            engine=engine,
            precision=config.precision,
            device=own.device.type,
            batch=images,
            iterations=settings.iterations,
            warmup=settings.warmup,
            images_per_second=images * len(seconds) / sum(seconds),
            latency=latency_from_seconds(seconds),
            data_share=sum(waits[settings.warmup :]) / sum(seconds),
            peak_memory_mib=_peak_memory_mib(own.device),
            losses=torch.stack(losses).tolist(),
        )


def _config_for(
    config: TrainConfig, engine: Engine, precision: TrainPrecision, iterations: int
) -> TrainConfig:
    # The schedule of the learning rate stays, be the run shorter or longer than the configured one.
    longest = max(iterations, config.solver.max_iterations)
    solver = config.solver.model_copy(update={"max_iterations": longest})
    model = config.model
    if engine == "torchvision":  # which knows masks of whole images only
        roi = model.roi.model_copy(update={"mask_crop_size": None})
        model = model.model_copy(update={"roi": roi})
    return config.model_copy(update={"precision": precision, "solver": solver, "model": model})


class _Clock:
    """Durations between moments of the device, which is not made to wait for them."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self.mark()

    def mark(self) -> None:
        """Note the moment at which the work so far is done."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds between successive moments."""
        if self._on_gpu:
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(self._events)]
        return [b - a for a, b in itertools.pairwise(self._times)]


def _reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        reset_peak_memory()


def _peak_memory_mib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return peak_memory_mib("cpu")
