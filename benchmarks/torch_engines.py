"""Checkpoints as engines: the project's own model, and torchvision's with the same weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..model.checkpoint import Checkpoint
from .torchvision_model import torchvision_from_config

TorchPrecision = Literal["fp32", "tf32", "fp16"]


@dataclass
class TorchEngine:
    """A torch module, not compiled, on the GPU if there is one."""

    name: str
    model: nn.Module
    precision: TorchPrecision
    inputs_from: Callable[[Tensor], tuple[Any, ...]]
    """Arguments of the model for images [B, 3, H, W] uint8 on its device."""

    def __post_init__(self) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model.eval().to(self.device)

    def bind(self, images: NDArray[np.uint8]) -> Callable[[], None]:
        """A call over images [B, 3, H, W], which lie on the device before it."""
        inputs = self.inputs_from(torch.from_numpy(images).to(self.device))
        torch.backends.cuda.matmul.allow_tf32 = self.precision == "tf32"
        torch.backends.cudnn.allow_tf32 = self.precision == "tf32"

        def run() -> None:
            with (
                torch.inference_mode(),
                torch.autocast(self.device, torch.float16, enabled=self.precision == "fp16"),
            ):
                self.model(*inputs)
            if self.device == "cuda":
                torch.cuda.synchronize()

        return run

    def close(self) -> None:
        """Give back the memory."""
        self.model = nn.Identity()
        torch.cuda.empty_cache()


def engine_from_checkpoint(checkpoint: Checkpoint, precision: TorchPrecision) -> TorchEngine:
    """The project's model."""
    model = checkpoint.build_model()
    nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
    return TorchEngine("torch", model, precision, _images_and_sizes)


def torchvision_from_checkpoint(checkpoint: Checkpoint, precision: TorchPrecision) -> TorchEngine:
    """Torchvision's model with the checkpoint's weights.

    It is measured as it ships: it scales the images and pastes the masks into them.
    """
    model = torchvision_from_config(checkpoint.model_config)
    model.load_state_dict(checkpoint.weights)

    def inputs_from(images: Tensor) -> tuple[list[Tensor]]:
        # The images have their size already; asking for it makes torchvision's resizing keep it.
        sides = images.shape[2:]
        model.transform.min_size, model.transform.max_size = (min(sides),), max(sides)
        return (list(images.float() / 255),)

    return TorchEngine("torchvision", model, precision, inputs_from)


def _images_and_sizes(images: Tensor) -> tuple[Tensor, Tensor]:
    sizes = torch.tensor(images.shape[2:], device=images.device).expand(len(images), 2)
    return images, sizes.contiguous()
