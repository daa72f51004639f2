"""Count images whose detections may be incomplete because of `roi.nms_candidates`."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from ...model.mask_rcnn import MaskRCNN


class LimitedImages:
    """Counter of images whose detections may be incomplete because of `roi.nms_candidates`.

    A candidate is a pair of proposal and class with a score above `roi.score_threshold`. If an
    image has more than `roi.nms_candidates` candidates, the model drops those with the lowest
    scores before NMS. Such an image is counted if the model returns fewer than `roi.max_detections`
    detections for it. If it returns this maximum, all of them have higher scores than the dropped
    candidates, so none is missing.

    Call the model inside a `with` block of the counter, and call `add` after each call of the
    model.
    """

    def __init__(self, model: MaskRCNN) -> None:
        """Create a counter, initially 0, of images for which `model` may drop detections."""
        self._roi_heads = model.roi_heads
        self._config = model.config.roi
        # [B * R] int64: number of candidates per proposal in the model's last call, for B images
        # with R proposals each.
        self._candidates = torch.zeros(0)
        # The count stays on the model's device, so that the evaluation does not wait for copies.
        self._count = torch.zeros((), dtype=torch.int64)

    def __enter__(self) -> Self:
        self._hook = self._roi_heads.box_predictor.register_forward_hook(self._keep_candidates)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _keep_candidates(self, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        logits: Tensor = outputs[0]
        scores = logits.float().softmax(dim=-1)[:, 1:]
        self._candidates = (scores > self._config.score_threshold).sum(dim=1)

    def add(self, num_detections: Tensor) -> None:
        """Count the images of the model's most recent call whose detections may be incomplete.

        Args:
            num_detections: [B] int64: number of detections that the call returned for each image.
        """
        candidates = self._candidates.view(len(num_detections), -1).sum(dim=1)
        limited = candidates > self._config.nms_candidates
        limited &= num_detections < self._config.max_detections
        self._count = self._count.to(limited.device) + limited.sum()

    def count(self) -> int:
        """Return the number of images so far whose detections may be incomplete."""
        return int(self._count)
