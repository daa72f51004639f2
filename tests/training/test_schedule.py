import pytest
import torch
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
)

from maskrcnn_trt.training.schedule import learning_rate
from maskrcnn_trt.training.solver_config import SolverConfig


@pytest.mark.parametrize(
    "config",
    [
        SolverConfig(max_iterations=60, steps=(20, 40), warmup_iterations=10),
        SolverConfig(max_iterations=60, steps=(20, 40), warmup_iterations=30, gamma=0.5),
        SolverConfig(max_iterations=60, steps=(), warmup_iterations=7, warmup_factor=0.001),
        SolverConfig(max_iterations=60, steps=(1, 59), warmup_iterations=0, base_lr=3.0),
        SolverConfig(
            max_iterations=60, steps=(9, 40), warmup_iterations=13, warmup_method="constant"
        ),
        SolverConfig(max_iterations=60, schedule="cosine", warmup_iterations=10),
        SolverConfig(max_iterations=60, schedule="linear", warmup_iterations=10),
    ],
    ids=["after", "within warm-up", "no steps", "no warm-up", "constant", "cosine", "linear"],
)
def test_rate_equals_torch_schedulers(config: SolverConfig) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=config.base_lr)
    length = config.max_iterations
    decay: LRScheduler = {
        "steps": lambda: MultiStepLR(optimizer, list(config.steps), config.gamma),
        "cosine": lambda: CosineAnnealingLR(optimizer, length),
        "linear": lambda: LinearLR(optimizer, 1.0, 0.0, length),
    }[config.schedule]()
    schedulers = [decay]
    if config.warmup_iterations:
        kind = {"linear": LinearLR, "constant": ConstantLR}[config.warmup_method]
        warmup = kind(optimizer, config.warmup_factor, total_iters=config.warmup_iterations)
        schedulers.append(warmup)
    for iteration in range(length):
        expected = optimizer.param_groups[0]["lr"]
        assert learning_rate(config, iteration) == pytest.approx(expected, rel=1e-9)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


def test_warm_up_may_start_at_zero() -> None:
    config = SolverConfig(warmup_factor=0, warmup_iterations=4, base_lr=0.8)
    rates = [learning_rate(config, iteration) for iteration in range(6)]
    assert rates == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 0.8])
