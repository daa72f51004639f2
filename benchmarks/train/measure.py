"""Measurement of a training configuration in several precisions, with baselines and seeds."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...training.config import ConfigError, TrainConfig
from ...training.devices import number_of_processes
from ...training.launcher import rank_environment
from ..common.processes import call_in_processes
from .run import TrainEngine, TrainPrecision, TrainResult, TrainSettings, measure_rank


def measure_training(
    config: TrainConfig,
    settings: TrainSettings,
    on_run: Callable[[TrainEngine, TrainPrecision], object] = lambda engine, precision: None,
) -> list[TrainResult]:
    """Train this project's model and the baselines in each precision with each seed.

    Every run uses new processes.

    Args:
        config: Configuration to train. Its precision and number of iterations are ignored. Its seed
            is the first of `settings.seeds` consecutive seeds. Its keys `device` and `processes`
            give the number of processes of a run.
        settings: Precisions, baselines, seeds and numbers of steps.
        on_run: Function that is called before each run.

    Returns:
        One result per run. If a run has several processes, its result is that of rank 0.

    Raises:
        ConfigError: the configuration does not match the data or the machine, or torchvision has
            no model of this configuration.
        DataError: the data set is invalid.
    """
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
            "processes; leave out --peer"
        )
    seeds = range(config.seed, config.seed + settings.seeds)
    engines: tuple[TrainEngine, ...] = ("this", *settings.peers)
    results = []
    for precision, engine, seed in itertools.product(settings.precisions, engines, seeds):
        on_run(engine, precision)
        run_config = _run_config(config, engine, precision, seed, settings.iterations)
        with _rank_environments(processes) as environments:
            ranks = [(run_config, engine, settings, environment) for environment in environments]
            first, *_ = call_in_processes(measure_rank, ranks)
        results.append(first)
    return results


@contextmanager
def _rank_environments(processes: int) -> Iterator[list[dict[str, str]]]:
    """Yield one dict of environment variables per rank. If there is one process, it is empty.

    The variables hold the rank, the number of ranks, and the address of a TCP store that connects
    the ranks. The store exists until the `with` block ends.
    """
    if processes == 1:
        yield [{}]
        return
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield [rank_environment(rank, processes, store.port) for rank in range(processes)]


def _run_config(
    config: TrainConfig,
    engine: TrainEngine,
    precision: TrainPrecision,
    seed: int,
    iterations: int,
) -> TrainConfig:
    # A run may end before max_iterations. Do not lower max_iterations, because the learning-rate
    # schedule depends on it.
    longest = max(iterations, config.solver.max_iterations)
    solver = config.solver.model_copy(update={"max_iterations": longest})
    model = config.model
    if engine == "torchvision":  # its targets are masks of whole images, not crops
        roi = model.roi.model_copy(update={"mask_crop_size": None})
        model = model.model_copy(update={"roi": roi})
    changes = {"precision": precision, "seed": seed, "solver": solver, "model": model}
    if engine == "eager":
        changes["compile"] = False
    return config.model_copy(update=changes)
