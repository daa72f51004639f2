"""Torchvision's model in training, as a peer of the project's."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from ..model.losses import LOSS_NAMES
from ..training.config import ConfigError, TrainConfig
from ..training.data.batches import Batch
from ..training.distributed import Worker
from ..training.trainer import (
    AUTOCAST_DTYPES,
    Trainer,
    apply_gradients,
    build_optimizer,
    set_learning_rates,
)
from .torchvision_model import torchvision_from_config


class _KeepSize(GeneralizedRCNNTransform):  # type: ignore[misc]
    """Torchvision's preparation for images that have their size already."""

    def resize(
        self, image: Tensor, target: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        return image, target


class TorchvisionTrainer:
    """Steps as a `Trainer` of the same configuration: initial weights, optimiser and precision.

    Each loss is averaged as torchvision averages it, an image or a batch at a time.
    """

    def __init__(self, config: TrainConfig, worker: Worker) -> None:
        """Take over the initial weights of a `Trainer`.

        Raises:
            ConfigError: torchvision has no such model.
        """
        own = Trainer(config, worker)
        model = torchvision_from_config(config.model)
        try:
            model.load_state_dict(own.model.state_dict())
        except RuntimeError as error:
            raise ConfigError(
                "torchvision has no model of this configuration; measure without --peer"
            ) from error
        for name, parameter in own.model.named_parameters():
            model.get_parameter(name).requires_grad_(parameter.requires_grad)
        transform = model.transform
        model.transform = _KeepSize(0, 0, transform.image_mean, transform.image_std)
        self._config, self._device = config, worker.device
        self._model = model.to(worker.device).train()
        self._optimizer = build_optimizer(self._model, config.solver)
        self._scaler = own.scaler
        self._iteration = 0

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """One optimiser step; [5] losses in the order of `LOSS_NAMES`, as of `Trainer.step`."""
        solver = self._config.solver
        set_learning_rates(self._optimizer, solver, self._iteration)
        losses = torch.zeros(len(LOSS_NAMES), device=self._device)
        for batch in batches:
            terms = self._losses(batch) / len(batches)
            self._scaler.scale(terms.sum()).backward()  # type: ignore[no-untyped-call]
            losses += terms.detach()
        apply_gradients(self._model, self._optimizer, self._scaler, solver)
        self._iteration += 1
        return losses

    def _losses(self, batch: Batch) -> Tensor:
        dtype = AUTOCAST_DTYPES.get(self._config.precision)
        with torch.autocast(self._device.type, dtype, enabled=dtype is not None):
            found: Mapping[str, Tensor] = self._model(*inputs_from(batch))
        return torch.stack([found[name].float() for name in LOSS_NAMES])


def inputs_from(batch: Batch) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Images and targets of a batch as torchvision takes them, without padding."""
    targets = batch.targets
    assert targets is not None
    images, own = [], []
    for n, (height, width) in enumerate(batch.image_sizes.tolist()):
        images.append(batch.images[n, :, :height, :width].float() / 255)
        sides = targets.boxes[n, :, 2:] - targets.boxes[n, :, :2]
        # Torchvision refuses boxes without an area, which the project's model passes over.
        real = (targets.labels[n] > 0) & (sides > 0).all(dim=1)
        own.append(
            {
                "boxes": targets.boxes[n][real],
                "labels": targets.labels[n][real],
                "masks": targets.masks[n][real][:, :height, :width],
            }
        )
    return images, own
