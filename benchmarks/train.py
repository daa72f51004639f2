"""Training speed and losses: a configuration in several precisions, on the same batches."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import TYPE_CHECKING, Literal

from .latency import Latency

if TYPE_CHECKING:
    from ..training.config import TrainConfig

TrainPrecision = Literal["fp32", "tf32", "fp16", "bf16"]
Engine = Literal["this", "torchvision"]


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """What is trained, and for how long."""

    precisions: Sequence[TrainPrecision]
    iterations: int = 100
    """Steps of each run."""
    warmup: int = 10
    """Steps of these, the first ones, that are not timed."""
    with_torchvision: bool = False
    """Train torchvision's model too, in each precision."""


@dataclass(frozen=True)
class TrainResult:
    """One model in one precision."""

    engine: Engine
    precision: TrainPrecision
    device: str
    batch: int
    """Images a step."""
    iterations: int
    warmup: int
    images_per_second: float
    """Over the steps that were timed, waiting for data included."""
    latency: Latency
    """Of a step, waiting for data included."""
    data_share: float
    """Share of that time in which the process waited for the next batch."""
    peak_memory_mib: float
    """On a GPU the peak that torch allocated, on the CPU the peak resident memory."""
    losses: Sequence[Sequence[float]]
    """[iterations, 5] in the order of `model.losses.LOSS_NAMES`, warm-up included."""

    @property
    def final_loss(self) -> float:
        """Mean of the total loss over the last tenth of the steps."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(map(sum, last)) / len(last)


def measure_training(
    config: "TrainConfig",
    settings: TrainSettings,
    on_run: Callable[[Engine, TrainPrecision], object] = lambda engine, precision: None,
) -> list[TrainResult]:
    """Train from the same initial weights in every precision, one after the other.

    Each run has a process of its own, so that none inherits memory or settings of another.

    Args:
        config: what is trained; its precision and number of iterations do not count.
        settings: precisions and lengths.
        on_run: called before each run.

    Raises:
        ConfigError: the configuration does not fit the data, the machine or the peer.
        DataError: the data cannot be used.
    """
    from .train_process import measure_run

    engines: list[Engine] = ["this"]
    if settings.with_torchvision:
        engines.append("torchvision")
    results = []
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for precision in settings.precisions:
            for engine in engines:
                on_run(engine, precision)
                run = pool.submit(measure_run, config, engine, precision, settings)
                results.append(run.result())
    return results
