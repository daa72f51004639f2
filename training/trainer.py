"""Optimiser step with mixed precision, gradient accumulation and data parallelism."""

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..model.checkpoint import Checkpoint
from ..model.losses import LossTerms
from ..model.mask_rcnn import MaskRCNN
from ..model.plurals import counted
from ..model.weights.loading import load_weights
from .config import ConfigError, TrainConfig
from .data.loading.batches import Batch
from .distributed import GradientSum, RankSum, Worker
from .fused_layers import fuse_layers
from .garbage_collection import collect_frozen_objects
from .optimizer import apply_gradients, build_optimizer, restore_optimizer, set_learning_rates
from .random_state import generator_states, restore_generators, seed_generators
from .weight_average import WeightAverage

logger = logging.getLogger(__name__)

# Minimum length of a run, in iterations, for `compile=auto` to compile. With 8 images per step, the
# time for the compilation is saved after about 2,000 steps.
WORTH_COMPILING = 3000
AUTOCAST_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def set_arithmetic(config: TrainConfig) -> None:
    """Enable TF32 in matrix products and convolutions if `precision` is tf32, else disable it."""
    allowed = config.precision == "tf32"
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def check_precision(config: TrainConfig, device: torch.device) -> None:
    """Check that a device supports `config.precision`.

    Raises:
        ConfigError: The precision is fp16, and the device is a CPU.
    """
    if config.precision == "fp16" and device.type == "cpu":
        raise ConfigError("precision=fp16 needs a GPU; use precision=bf16 or fp32 on a CPU")


class GpuMemoryError(Exception):
    """A training step or an evaluation needs more memory than the GPU has."""


class Trainer:
    """Model, optimiser and loss scaler of a run on one rank, and the number of steps taken."""

    def __init__(self, config: TrainConfig, worker: Worker) -> None:
        check_precision(config, worker.device)
        self.config = config
        self.worker = worker
        self.iteration = 0
        if self._compiles() or worker.world_size > 1:
            # Free the GPU memory of earlier runs in this process. A model that is compiled, or
            # wrapped in DistributedDataParallel, is part of a reference cycle. `CocoDataset` calls
            # `gc.freeze`, which excludes the existing cycles from later garbage collections.
            collect_frozen_objects()
        seed_generators(config.seed)
        self.model = MaskRCNN(config.model)
        if config.weights is not None:
            report = load_weights(self.model, config.weights)
            if worker.is_main:
                logger.info("weights: loaded %s", report)
        memory_format = torch.channels_last if config.channels_last else torch.contiguous_format
        self.model.to(worker.device).to(memory_format=memory_format).train()  # type: ignore[call-overload]
        self.optimizer = build_optimizer(self.model, config.solver)
        self.scaler = torch.amp.grad_scaler.GradScaler(
            worker.device.type, enabled=config.precision == "fp16"
        )
        decay = config.solver.ema_decay
        self.average = None if decay is None else WeightAverage(self.model, decay)
        self._counts_sum = RankSum(worker.world_size)
        self._gradient_sum: GradientSum | None = None
        if self._compiles():
            from .compiled_losses import CompiledLosses, parameters_by_part  # slow import

            if self._sums_gradients():
                self._gradient_sum = GradientSum(parameters_by_part(self.model))
            if worker.device.type == "cuda":
                # Fuse only if the model is compiled. In eager mode, launching the fused operations
                # takes as much time as the fusion saves.
                fuse_layers(self.model)
            one_pass = config.solver.accumulate == 1
            # Replace the method before `_over_ranks`, so that DistributedDataParallel, if there is
            # one, wraps the compiled losses.
            self.model.losses = CompiledLosses(  # type: ignore[method-assign]
                self.model,
                # Each replay of a CUDA graph overwrites the gradients of the previous replay, so
                # gradients cannot be accumulated.
                graphs=worker.device.type == "cuda" and one_pass,
                required=config.compile is True,
                on_counts=self._counts_sum.start if one_pass else None,
                on_gradients=self._gradient_sum.start if self._gradient_sum and one_pass else None,
            )
        self._parallel = self._over_ranks()

    def _compiles(self) -> bool:
        if self.config.compile != "auto":
            return self.config.compile
        long = self.config.solver.max_iterations >= WORTH_COMPILING
        return long and self.worker.device.type == "cuda"

    def _sums_gradients(self) -> bool:
        """Return whether `GradientSum`, not DistributedDataParallel, sums the gradients."""
        # Each part of a compiled backward pass returns all its gradients at once, so
        # DistributedDataParallel would only add a copy of each gradient into its communication
        # buffers. A model with changing buffers needs DistributedDataParallel, which copies these
        # buffers from rank 0.
        return self.worker.world_size > 1 and self._compiles() and not _changing_buffers(self.model)

    def _over_ranks(self) -> nn.Module:
        """Return the model, wrapped in DistributedDataParallel if necessary.

        DistributedDataParallel sums the gradients over the ranks. It is not needed if there is only
        one rank, or if `GradientSum` sums the gradients.
        """
        if self.worker.world_size == 1 or self._gradient_sum is not None:
            return self.model
        return DistributedDataParallel(
            self.model, broadcast_buffers=bool(_changing_buffers(self.model))
        )

    def load_state(self, checkpoint: Checkpoint) -> None:
        """Restore model, optimiser, loss scaler and random generators from a checkpoint.

        Settings of the optimiser, such as weight decay, are taken from the configuration, not from
        the checkpoint. If the number of ranks has changed, the random generators are not restored.
        Call `check_resumable` first.
        """
        state = checkpoint.training_state
        # With a moving average, the checkpoint's `weights` are the average, and its training state
        # has the weights of the trained model.
        self.model.load_state_dict(state.get("model", checkpoint.weights))
        if self.average is not None:
            self.average.model.load_state_dict(checkpoint.weights)
        restore_optimizer(self.optimizer, state["optimizer"])
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.iteration = checkpoint.iteration
        worker, generators = self.worker, state["generators"]
        if len(generators) == worker.world_size:
            restore_generators(generators[worker.rank], worker.device)
        elif worker.is_main:
            logger.warning(
                "the run was interrupted with %d processes and is resumed with %d: the global "
                "random generators, which only custom layers use, restart from the seed",
                len(generators),
                worker.world_size,
            )

    @property
    def evaluated_model(self) -> MaskRCNN:
        """Model to evaluate and export: the moving average if there is one, else the model."""
        return self.model if self.average is None else self.average.model

    def share_statistics(self) -> None:
        """Replace the batch-norm statistics of `evaluated_model` by those of rank 0.

        Call this on every rank before an evaluation over all ranks, so that all ranks evaluate the
        model that checkpoints contain. After a step, each rank has the statistics of its own
        images, but checkpoints have those of rank 0.
        """
        for buffer in _changing_buffers(self.evaluated_model):
            self.worker.broadcast(buffer)

    def state(self) -> dict[str, Any]:
        """Return the states of optimiser, loss scaler and random generators, for a checkpoint.

        If a moving average of the weights is kept, the checkpoint's `weights` are the average. The
        result then also includes the weights of the trained model.

        Every rank must call this method. Only the result on rank 0 has states of random generators:
        those of all ranks.
        """
        trained = {} if self.average is None else {"model": self.model.state_dict()}
        return {
            **trained,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "generators": self.worker.gather(generator_states(self.worker.device)),
        }

    def freeze_backbone(self) -> None:
        """Freeze the ResNet (not the FPN): its weights and batch-norm statistics.

        With C4 features, also freeze res5, which is a part of the heads.
        """
        backbone, heads = self.model.backbone, self.model.roi_heads
        parameters = [*backbone.body.parameters(), *heads.shared_head.parameters()]
        if not any(parameter.requires_grad for parameter in parameters):
            return
        logger.info(
            "ResNet frozen from iteration %d (solver.freeze_backbone_after_epoch=%s)",
            self.iteration,
            self.config.solver.freeze_backbone_after_epoch,
        )
        backbone.freeze()
        heads.freeze_shared_head()
        for parameter in parameters:
            # Drop the optimiser's state. The optimiser skips parameters without gradient, so their
            # momentum would only make checkpoints larger.
            self.optimizer.state.pop(parameter, None)
        # DistributedDataParallel expects gradients of the parameters that were trainable when it
        # was constructed, so it is constructed again.
        self._parallel = self._over_ranks()

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """Take one optimiser step on this rank's share of the global batch.

        Each loss is averaged over the global batch, so the result does not depend on the number of
        ranks and accumulated passes.

        Args:
            batches: This rank's batches of the step, one per accumulated pass.

        Returns:
            [5] float32 losses of the global batch, in the order of `LOSS_NAMES`, on this rank's
            device.

        Raises:
            GpuMemoryError: The step needs more memory than the GPU has.
        """
        try:
            return self._step(batches)
        except torch.OutOfMemoryError as error:
            raise GpuMemoryError(_memory_message(self.config, self.worker.world_size)) from error

    def _step(self, batches: Sequence[Batch]) -> Tensor:
        config, world_size = self.config.solver, self.worker.world_size
        set_learning_rates(self.optimizer, config, self.iteration)
        # The first backward pass needs the loss denominators of the global batch. If there are
        # several passes, first sample the anchors and RoIs of all passes, without gradients.
        counts = self._counts(batches) if len(batches) > 1 else None
        sums = torch.zeros(5, device=self.worker.device)
        averages = self._parallel is not self.model
        for part, batch in enumerate(batches, start=1):
            with ExitStack() as stack:
                if averages and part < len(batches):
                    stack.enter_context(self._parallel.no_sync())  # type: ignore[operator]
                with self.autocast():
                    terms: LossTerms = self._parallel(
                        batch.images, batch.image_sizes, batch.targets, batch.seeds
                    )
                sums += terms.sums.detach()
                if counts is None:
                    # This has no effect if `CompiledLosses` has started the sum.
                    self._counts_sum.start(terms.counts)
                    counts = self._counts_sum.result()
                loss = terms.means(counts).sum()
                # `counts` covers all ranks, so the gradients of the ranks must be summed.
                # DistributedDataParallel averages them, so multiply by the number of ranks.
                self.scaler.scale(loss * world_size if averages else loss).backward()  # type: ignore[no-untyped-call]
        if self._gradient_sum is not None:
            self._gradient_sum.finish()
        global_sums = RankSum(world_size)
        global_sums.start(sums)
        apply_gradients(self.model, self.optimizer, self.scaler, config)
        self.iteration += 1
        if self.average is not None:
            self.average.update(self.model, self.iteration)
        assert counts is not None
        return LossTerms(global_sums.result(), counts).means()

    def _counts(self, batches: Sequence[Batch]) -> Tensor:
        """Return the denominators of the five losses [5], summed over the batches of all ranks.

        Each loss of the global batch is divided by its denominator. In the order of `LOSS_NAMES`,
        the denominators are the numbers of sampled anchors (for two losses), sampled RoIs (for two
        losses), and mask pixels of positive RoIs.
        """
        counts = torch.zeros(5, device=self.worker.device)
        buffers = [(buffer, buffer.clone()) for buffer in _changing_buffers(self.model)]
        with torch.no_grad(), self.autocast():
            for batch in batches:
                assert batch.targets is not None
                counts += self.model.sample(
                    batch.images, batch.image_sizes, batch.targets, batch.seeds
                ).counts
            # The statistics of batch norm must not include these images twice.
            for buffer, original in buffers:
                buffer.copy_(original)
        return self.worker.sum_over_ranks(counts)

    def autocast(self) -> torch.autocast | nullcontext[None]:
        """Return the autocast context manager for `config.precision`."""
        dtype = AUTOCAST_DTYPES.get(self.config.precision)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.worker.device.type, dtype)


def _changing_buffers(model: nn.Module) -> list[Tensor]:
    # Only batch norm changes buffers.
    norms = (module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    return [buffer for norm in norms for buffer in norm.buffers()]


def _memory_message(config: TrainConfig, world_size: int) -> str:
    """Return the message for a training step that needs more memory than the GPU has."""
    solver, passes = config.solver, config.solver.accumulate
    share = solver.images_per_batch // world_size
    images = share // passes
    if images > 1:
        more = next(n for n in range(2 * passes, share + 1) if share % n == 0)
        remedy = (
            f"set solver.accumulate={more}, which computes the same step with "
            f"{counted(share // more, 'image')} per pass, or lower solver.images_per_batch"
        )
    elif config.precision in ("fp32", "tf32"):
        remedy = "set precision=bf16, or lower data.min_size and data.max_size"
    else:
        remedy = "lower data.min_size and data.max_size, or choose a smaller backbone"
    largest = max(config.data.buckets, key=math.prod)
    return f"out of GPU memory (images per pass: {images}, of up to {largest} pixels); {remedy}"
