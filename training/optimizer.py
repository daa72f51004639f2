"""Optimiser of a training run: parameter groups, learning rates, and clipping of gradients."""

from typing import Any

import torch
from torch import nn

from .schedule import learning_rate
from .solver_config import SolverConfig


def build_optimizer(model: nn.Module, config: SolverConfig) -> torch.optim.Optimizer:
    """Create SGD or AdamW for a model's trainable parameters.

    Biases and normalisation parameters have no weight decay.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    biases = [p for name, p in trainable.items() if name.endswith("bias")]
    others = [p for name, p in trainable.items() if not name.endswith("bias")]
    weights = [p for p in others if p.dim() > 1]
    scales = [p for p in others if p.dim() <= 1]
    groups = [
        {"params": weights, "weight_decay": config.weight_decay, "lr_factor": 1.0},
        {"params": scales, "weight_decay": 0.0, "lr_factor": 1.0},
        {"params": biases, "weight_decay": 0.0, "lr_factor": config.bias_lr_factor},
    ]
    if config.optimizer == "adamw":
        betas = (config.momentum, 0.999)
        return torch.optim.AdamW(groups, lr=config.base_lr, betas=betas, fused=True)
    sgd = torch.optim.SGD(groups, lr=config.base_lr, momentum=config.momentum, fused=True)
    _create_momentum(sgd)
    return sgd


def restore_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Restore the state of an optimiser, such as momentum, from a checkpoint.

    `state` is the optimiser's `state_dict` in the checkpoint. The optimiser keeps its own settings,
    such as weight decay.
    """
    settings = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    for parameter, tensors in optimizer.state.items():
        for name, tensor in tensors.items():
            if tensor.shape == parameter.shape:
                # Fused optimisers pair the elements of a parameter and of its state by their order
                # in memory, which differs if the key `channels_last` has changed.
                tensors[name] = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
    if isinstance(optimizer, torch.optim.SGD):
        # Parameters that were frozen in the interrupted run have no momentum.
        _create_momentum(optimizer)


def _create_momentum(sgd: torch.optim.SGD) -> None:
    """Create the momentum buffers that do not exist yet.

    Fused SGD creates all of them in its first step, except if that step overflows in fp16. A
    checkpoint without them could not be resumed.
    """
    for group in sgd.param_groups:
        for parameter in group["params"]:
            state = sgd.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)


def set_learning_rates(
    optimizer: torch.optim.Optimizer, config: SolverConfig, iteration: int
) -> None:
    """Set the learning rate of every parameter group for an iteration, counted from 0."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, iteration) * group["lr_factor"]


def apply_gradients(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.grad_scaler.GradScaler,
    config: SolverConfig,
) -> None:
    """Clip gradients if `clip_gradient_norm` is set, step the optimiser, and reset gradients."""
    if config.clip_gradient_norm is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_gradient_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
