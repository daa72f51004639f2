"""Compilation of the training losses and their gradients by torch."""

import logging
import os
import time
import warnings

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as autograd_config

from ..model.losses import LossTerms
from ..model.mask_rcnn import MaskRCNN
from ..model.targets import Targets
from ..plugins.runtime.user_cache import cache_folder
from .config import ConfigError

logger = logging.getLogger(__name__)


class CompiledLosses:
    """`MaskRCNN.losses` compiled by torch: one program for each shape of the images."""

    def __init__(self, model: MaskRCNN, backend: str = "inductor") -> None:
        """Prepare the compilation, which takes place in the first call for each shape.

        Args:
            model: Model to train.
            backend: Compiler of `torch.compile`.
        """
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder("inductor")))
        self._eager = model.losses
        self._losses = torch.compile(model.losses, dynamic=False, backend=backend)
        self._compiled: set[torch.Size] = set()

    def __call__(
        self, images: Tensor, image_sizes: Tensor, targets: Targets, seeds: Tensor
    ) -> LossTerms:
        """Return the five losses of a batch; arguments as of `MaskRCNN.forward`.

        Raises:
            ConfigError: torch cannot compile on this machine.
        """
        if not torch.is_grad_enabled():
            # The extra pass of gradient accumulation is not worth a second compilation.
            return self._eager(images, image_sizes, targets, seeds)
        for tensor in targets:
            # The number of objects differs from batch to batch.
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
        if images.shape in self._compiled:
            return self._losses(images, image_sizes, targets, seeds)
        self._compiled.add(images.shape)
        return self._compile(images, image_sizes, targets, seeds)

    def _compile(
        self, images: Tensor, image_sizes: Tensor, targets: Targets, seeds: Tensor
    ) -> LossTerms:
        height, width = images.shape[2:]
        logger.info("compiling the training step for images of %dx%d pixels", height, width)
        start = time.perf_counter()
        # Compiles the gradients too, which would otherwise wait for the first backward pass.
        eagerly = autograd_config.patch(force_non_lazy_backward_lowering=True)
        try:
            with eagerly, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # hints for developers of torch
                losses = self._losses(images, image_sizes, targets, seeds)
        except BackendCompilerFailed as error:
            raise ConfigError(
                f"torch cannot compile the training step: {str(error).splitlines()[0]}; "
                "set compile=false"
            ) from error
        logger.info("compiled in %.0f s", time.perf_counter() - start)
        return losses
