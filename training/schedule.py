"""Learning rate as a function of the iteration."""

from .config import SolverConfig


def learning_rate(config: SolverConfig, iteration: int) -> float:
    """Rate at an iteration counted from 0: warm-up, then steps (Goyal et al., 2017)."""
    rate = config.base_lr * config.gamma ** sum(iteration >= step for step in config.steps)
    if iteration >= config.warmup_iterations:
        return rate
    if config.warmup_method == "constant":
        return rate * config.warmup_factor
    progress = iteration / config.warmup_iterations
    return rate * (config.warmup_factor * (1 - progress) + progress)
