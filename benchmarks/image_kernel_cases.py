"""Decoded photographs on their way into a batch."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as transforms

from ..model.images import resized_size
from ..plugins.resize_pad import resize_pad
from .kernels import KernelCase, Peer
from .workload import Workload, kernel_case

_LIMIT = "loads of single bytes: for each pixel those that it covers, and two a side at least"


def resizing_cases(workload: Workload) -> Iterator[KernelCase]:
    """Pictures that are enlarged, as COCO's are, and a camera's, which have far more pixels."""
    batch, height, width = workload.batch, workload.height, workload.width
    for scale in (0.6, 4.0):
        sides = round(scale * height), round(scale * height * 4 / 3)
        images = [workload.randint(256, 3, *sides).to(torch.uint8) for _ in range(batch)]
        size = list(resized_size(*sides, height, width))
        yield kernel_case(
            "resize_pad",
            f"{batch} of {sides[0]}x{sides[1]} to {height}x{width}",
            _LIMIT,
            partial(resize_pad, images, size * batch, height, width),
            images,
            (Peer("torchvision", partial(_by_torchvision, images, size, height, width)),),
        )


def _by_torchvision(images: list[Tensor], size: list[int], height: int, width: int) -> Tensor:
    margins = [0, 0, width - size[1], height - size[0]]
    resized = (transforms.resize(image, size, antialias=True) for image in images)
    return torch.stack([transforms.pad(image, margins) for image in resized])
