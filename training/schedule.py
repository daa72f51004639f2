"""Learning-rate schedule: linear or constant warm-up, then step, cosine or linear decay."""

import math

from .solver_config import SolverConfig


def learning_rate(config: SolverConfig, iteration: int) -> float:
    """Return the learning rate of an iteration, counted from 0."""
    rate = config.base_lr * _decay(config, iteration)
    if iteration >= config.warmup_iterations:
        return rate
    if config.warmup_method == "constant":
        return rate * config.warmup_factor
    progress = iteration / config.warmup_iterations
    return rate * (config.warmup_factor * (1 - progress) + progress)


def _decay(config: SolverConfig, iteration: int) -> float:
    done = iteration / config.max_iterations
    match config.schedule:
        case "steps":
            return config.gamma ** sum(iteration >= step for step in config.steps)
        case "cosine":
            return (1 + math.cos(math.pi * done)) / 2
        case "linear":
            return 1 - done
