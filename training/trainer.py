"""A model in training: its optimiser, its precision and one step after another."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from ..model.checkpoint import Checkpoint
from ..model.losses import LossTerms
from ..model.mask_rcnn import MaskRCNN
from ..model.weights.loading import load_weights
from .config import ConfigError, SolverConfig, TrainConfig
from .data.batches import Batch
from .distributed import Worker
from .random_state import generator_states, restore_generators, seed_generators
from .schedule import learning_rate

logger = logging.getLogger(__name__)

AUTOCAST_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def set_arithmetic(config: TrainConfig) -> None:
    """Allow or forbid TF32 in the matrix products and convolutions of float32 tensors."""
    allowed = config.precision == "tf32"
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


class Trainer:
    """A model, its optimiser and where they stand; one step an iteration."""

    def __init__(self, config: TrainConfig, worker: Worker) -> None:
        if config.precision == "fp16" and worker.device.type == "cpu":
            raise ConfigError("precision=fp16 needs a GPU; use precision=bf16 or fp32 on a CPU")
        self.config = config
        self.worker = worker
        self.iteration = 0
        seed_generators(config.seed)
        self.model = MaskRCNN(config.model)
        if config.weights is not None:
            self._load_weights(config.weights)
        memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        self.model.to(worker.device).to(memory_format=memory_format).train()  # type: ignore[call-overload]
        self.optimizer = build_optimizer(self.model, config.solver)
        self.scaler = torch.amp.grad_scaler.GradScaler(
            worker.device.type, enabled=config.precision == "fp16"
        )
        self._parallel = self._over_ranks()

    def _over_ranks(self) -> nn.Module:
        if self.worker.world_size == 1:
            return self.model
        return DistributedDataParallel(self.model)

    def _load_weights(self, source: str | Path) -> None:
        report = load_weights(self.model, source)
        if self.worker.is_main:
            logger.info("weights: loaded %s", report)

    def load_state(self, checkpoint: Checkpoint) -> None:
        """Continue where a checkpoint was written; `check_resumable` says whether it may be.

        Settings of the optimiser are those of the configuration, not of the checkpoint.
        """
        state = checkpoint.training_state
        settings = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        self.model.load_state_dict(checkpoint.weights)
        self.optimizer.load_state_dict(state["optimizer"])
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.iteration = checkpoint.iteration
        worker, generators = self.worker, state["generators"]
        if len(generators) == worker.world_size:
            restore_generators(generators[worker.rank], worker.device)
        elif worker.is_main:
            logger.warning(
                "the run to resume had %d processes, this one has %d: the random generators of "
                "torch, numpy and Python start anew from the seed; only layers of your own draw "
                "from them",
                len(generators),
                worker.world_size,
            )

    def state(self) -> dict[str, Any]:
        """What resuming needs beside the weights; every rank must call it, the first one gets all.

        Batches, flips and sampling are functions of seed and iteration and need no state.
        """
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "generators": self.worker.gather(generator_states(self.worker.device)),
        }

    def freeze_backbone(self) -> None:
        """Train the residual network no more: neither its weights nor statistics of its norms."""
        backbone = self.model.backbone
        parameters = list(backbone.body.parameters())
        if not any(parameter.requires_grad for parameter in parameters):
            return
        logger.info("the residual network is frozen from here on")
        backbone.freeze()
        for parameter in parameters:
            # Without a gradient the optimiser passes it over; momentum would only fill checkpoints.
            self.optimizer.state.pop(parameter, None)
        # DistributedDataParallel waits for the gradients that were wanted when it was made.
        self._parallel = self._over_ranks()

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """One optimiser step on this rank's part of a global batch.

        Every loss is averaged over the global batch, whatever its split into ranks and
        accumulated parts, so that the split does not change the result. With more than one part
        the counts to average by take an extra pass without gradients.

        Args:
            batches: one a part.

        Returns:
            [5] losses of the global batch, in the order of `LOSS_NAMES`, on the device.
        """
        config, world_size = self.config.solver, self.worker.world_size
        set_learning_rates(self.optimizer, config, self.iteration)
        counts = self._counts(batches) if len(batches) > 1 else None
        sums = torch.zeros(5, device=self.worker.device)
        for part, batch in enumerate(batches, start=1):
            with ExitStack() as stack:
                if world_size > 1 and part < len(batches):
                    stack.enter_context(self._parallel.no_sync())  # type: ignore[operator]
                terms = self._losses(self._parallel, batch)
                if counts is None:
                    counts = self.worker.sum_over_ranks(terms.counts)
                # The gradients of the ranks are averaged; the losses are to be summed.
                self.scaler.scale(terms.means(counts).sum() * world_size).backward()  # type: ignore[no-untyped-call]
            sums += terms.sums.detach()
        apply_gradients(self.model, self.optimizer, self.scaler, config)
        self.iteration += 1
        assert counts is not None
        return LossTerms(self.worker.sum_over_ranks(sums), counts).means()

    def _losses(self, model: Callable[..., LossTerms], batch: Batch) -> LossTerms:
        with self.autocast():
            return model(batch.images, batch.image_sizes, batch.targets, batch.seeds)

    def _counts(self, batches: Sequence[Batch]) -> Tensor:
        """Sampled anchors, RoIs and mask pixels of the global batch: [5]."""
        # On copies of the buffers, so that batch norm does not see the images twice.
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}

        def forward(*inputs: Any) -> LossTerms:
            terms: LossTerms = functional_call(self.model, buffers, inputs)
            return terms

        with torch.no_grad():
            counts = torch.stack([self._losses(forward, batch).counts for batch in batches])
        return self.worker.sum_over_ranks(counts.sum(dim=0))

    def autocast(self) -> torch.autocast | nullcontext[None]:
        """Context in which the model computes in the configured precision."""
        dtype = AUTOCAST_DTYPES.get(self.config.precision)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.worker.device.type, dtype)


def build_optimizer(model: nn.Module, config: SolverConfig) -> torch.optim.Optimizer:
    """Optimiser of the trainable parameters; only the weights of layers decay."""
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
    for parameter in trainable.values():
        # Fused SGD makes these in its first step, and leaves them unset if fp16 overflows in it.
        sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return sgd


def set_learning_rates(
    optimizer: torch.optim.Optimizer, config: SolverConfig, iteration: int
) -> None:
    """Give every group of `build_optimizer` the rate of an iteration, counted from 0."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, iteration) * group["lr_factor"]


def apply_gradients(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.grad_scaler.GradScaler,
    config: SolverConfig,
) -> None:
    """Take the optimiser's step with a model's scaled gradients, clipped if configured."""
    if config.clip_gradient_norm is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_gradient_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
