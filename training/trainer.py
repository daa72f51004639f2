"""The training loop."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from ..model.checkpoint import Checkpoint, load_checkpoint
from ..model.losses import LossTerms
from ..model.mask_rcnn import MaskRCNN
from .config import ConfigError, SolverConfig, TrainConfig
from .data.batches import Batch
from .distributed import Worker
from .schedule import learning_rate

logger = logging.getLogger(__name__)

AUTOCAST_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Trainer:
    """A model, its optimiser and where they stand; one step an iteration."""

    def __init__(self, config: TrainConfig, worker: Worker) -> None:
        if config.precision == "fp16" and worker.device.type == "cpu":
            raise ConfigError("precision=fp16 needs a GPU; use precision=bf16 or fp32 on a CPU")
        self.config = config
        self.worker = worker
        self.iteration = 0
        torch.manual_seed(config.seed)
        self.model = MaskRCNN(config.model)
        if config.weights is not None:
            self._load_weights(config.weights)
        memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        self.model.to(worker.device).to(memory_format=memory_format).train()  # type: ignore[call-overload]
        self.optimizer = build_optimizer(self.model, config.solver)
        self.scaler = torch.amp.grad_scaler.GradScaler(
            worker.device.type, enabled=config.precision == "fp16"
        )
        self._parallel: nn.Module = self.model
        if worker.world_size > 1:
            self._parallel = DistributedDataParallel(self.model)

    def _load_weights(self, path: Path) -> None:
        checkpoint = load_checkpoint(path)
        try:
            self.model.load_state_dict(checkpoint.weights)
        except RuntimeError as error:
            raise ConfigError(
                f"weights: {path} holds another `model`, of {checkpoint.model_config.num_classes} "
                "classes; give the `model` and the classes it was trained with"
            ) from error

    def load_state(self, checkpoint: Checkpoint) -> None:
        """Continue where a checkpoint of this run was written.

        Raises:
            ConfigError: the checkpoint is of another model or another seed.
        """
        if checkpoint.model_config != self.config.model:
            raise ConfigError("the run to resume has another `model`; give the same configuration")
        state = checkpoint.training_state
        if state["seed"] != self.config.seed:
            raise ConfigError(f"the run to resume has seed={state['seed']}; give the same")
        self.model.load_state_dict(checkpoint.weights)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.iteration = checkpoint.iteration

    def state(self) -> dict[str, Any]:
        """What resuming needs beside the weights.

        Batches, flips and sampling are functions of seed and iteration: no generator has a state.
        """
        return {
            "seed": self.config.seed,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

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
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, self.iteration)
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
        self._apply_gradients()
        self.iteration += 1
        assert counts is not None
        return LossTerms(self.worker.sum_over_ranks(sums), counts).means()

    def _apply_gradients(self) -> None:
        limit = self.config.solver.clip_gradient_norm
        if limit is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

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
    trainable = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trainable if p.dim() > 1]
    others = [p for p in trainable if p.dim() <= 1]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if config.optimizer == "adamw":
        betas = (config.momentum, 0.999)
        return torch.optim.AdamW(groups, lr=config.base_lr, betas=betas, fused=True)
    sgd = torch.optim.SGD(groups, lr=config.base_lr, momentum=config.momentum, fused=True)
    for parameter in trainable:
        # Fused SGD makes these in its first step, and leaves them unset if fp16 overflows in it.
        sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return sgd
