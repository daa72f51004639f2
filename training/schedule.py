"""Learning-rate schedule: linear or constant warm-up, then multi-step decay."""

from .config import SolverConfig


def learning_rate(config: SolverConfig, iteration: int) -> float:
    """Return the learning rate of an iteration, counted from 0."""
    rate = config.base_lr * config.gamma ** sum(iteration >= step for step in config.steps)
    if iteration >= config.warmup_iterations:
        return rate
    if config.warmup_method == "constant":
        return rate * config.warmup_factor
    progress = iteration / config.warmup_iterations
    return rate * (config.warmup_factor * (1 - progress) + progress)
