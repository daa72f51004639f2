"""Checkpoints as engines: the project's own model, and torchvision's with the same weights."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..model.checkpoint import Checkpoint, CheckpointError
from ..model.manifest import Precision
from ..training.trainer import AUTOCAST_DTYPES
from .engines import Run
from .torchvision_model import torchvision_from_config


@dataclass
class TorchEngine:
    """A torch module, not compiled, on the GPU if there is one."""

    name: str
    model: nn.Module
    precision: Precision
    inputs_from: Callable[[Tensor], tuple[Any, ...]]
    """Arguments of the model for images [B, 3, H, W] uint8 on its device."""
    counts_in: Callable[[Any], Iterable[int]]
    """Detections of each image in what the model returns."""

    def __post_init__(self) -> None:
        self.device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
        self.model.eval().to(self.device)

    def runs_over(self, images: NDArray[np.uint8]) -> list[Run]:
        """Images [B, 3, H, W] lie on the device; what is found stays there."""
        inputs = self.inputs_from(torch.from_numpy(images).to(self.device))
        torch.backends.cuda.matmul.allow_tf32 = self.precision == "tf32"
        torch.backends.cudnn.allow_tf32 = self.precision == "tf32"
        dtype = AUTOCAST_DTYPES.get(self.precision)

        def detect() -> object:
            with (
                torch.inference_mode(),
                torch.autocast(self.device, dtype, enabled=dtype is not None),
            ):
                return self.model(*inputs)

        on_gpu = self.device == "cuda"
        return [
            Run(
                engine=self.name,
                device=self.device,
                data="device",
                memory="torch" if on_gpu else "cpu",
                queue=detect,
                counts_in=self.counts_in,
                wait=torch.cuda.synchronize if on_gpu else None,
            )
        ]


def engine_from_checkpoint(checkpoint: Checkpoint, precision: Precision) -> TorchEngine:
    """The project's model."""
    model = checkpoint.build_model()
    nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
    return TorchEngine(
        "eager", model, precision, _images_and_sizes, lambda found: found.num_detections.tolist()
    )


def torchvision_from_checkpoint(checkpoint: Checkpoint, precision: Precision) -> TorchEngine:
    """Torchvision's model with the checkpoint's weights.

    It is measured as it ships: it scales the images and pastes the masks into them.

    Raises:
        CheckpointError: torchvision has no such model.
    """
    model = torchvision_from_config(checkpoint.model_config)
    try:
        model.load_state_dict(checkpoint.weights)
    except RuntimeError as error:
        raise CheckpointError(
            "torchvision has no model of the checkpoint's configuration; measure without it"
        ) from error

    def inputs_from(images: Tensor) -> tuple[list[Tensor]]:
        # The images have their size already; asking for it makes torchvision's resizing keep it.
        sides = images.shape[2:]
        model.transform.min_size, model.transform.max_size = (min(sides),), max(sides)
        return (list(images.float() / 255),)

    def counts_in(found: list[dict[str, Tensor]]) -> list[int]:
        return [len(image["boxes"]) for image in found]

    return TorchEngine("torchvision", model, precision, inputs_from, counts_in)


def _images_and_sizes(images: Tensor) -> tuple[Tensor, Tensor]:
    sizes = torch.tensor(images.shape[2:], device=images.device).expand(len(images), 2)
    return images, sizes.contiguous()
