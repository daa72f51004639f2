"""Exponential moving average (EMA) of a model's weights."""

from copy import deepcopy

import torch

from ..model.mask_rcnn import MaskRCNN


class WeightAverage:
    """Copy of a model. Its weights and buffers are exponential moving averages over the steps.

    Integer buffers are not averaged. They have the values of the latest step.
    """

    def __init__(self, model: MaskRCNN, decay: float) -> None:
        """Copy a model, so that the average starts with the model's current weights.

        Args:
            model: Model in training.
            decay: Weight of the old average in an update, from 0 to 1. In the first updates, the
                weight is lower.
        """
        self.model = deepcopy(model).requires_grad_(False)
        self._decay = decay

    @torch.no_grad()
    def update(self, model: MaskRCNN, step: int) -> None:
        """Update the average with the weights of the model after a step, counted from 1."""
        # Limit the decay as TensorFlow does, so that the average quickly forgets the initial
        # weights.
        decay = min(self._decay, (1 + step) / (10 + step))
        pairs = zip(self.model.state_dict().values(), model.state_dict().values(), strict=True)
        floats = []
        for average, current in pairs:
            if average.is_floating_point():
                floats.append((average, current))
            else:
                average.copy_(current)
        averages, currents = zip(*floats, strict=True)
        torch._foreach_lerp_(averages, currents, 1 - decay)
