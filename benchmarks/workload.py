"""What a batch of images holds, from which the inputs of kernels are drawn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .kernels import Goal, KernelCase, Peer


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A batch as R-50-FPN has it, or a share of it."""

    device: str = "cuda"
    batch: int = 8
    height: int = 800
    """Pixels of the input."""
    width: int = 1344
    """Pixels of the input."""
    image_width: int = 1333
    """Pixels of these that are no padding."""
    share: float = 1.0
    """Of the RoIs, candidates and instances that there usually are."""
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def count(self, full: int) -> int:
        """So many, or the share of them, but at least one."""
        return max(1, round(full * self.share))

    def rand(self, *shape: int) -> Tensor:
        """Numbers from 0 to 1, drawn on the CPU, so that every device gets the same."""
        return torch.rand(shape, generator=self.generator).to(self.device)

    def randn(self, *shape: int) -> Tensor:
        """Numbers of standard normal distribution, likewise."""
        return torch.randn(shape, generator=self.generator).to(self.device)

    def randint(self, end: int, *shape: int) -> Tensor:
        """Whole numbers from 0 to `end - 1`, likewise."""
        return torch.randint(end, shape, generator=self.generator).to(self.device)

    def boxes(self, *shape: int) -> Tensor:
        """Boxes [*shape, 4] within the image, their sides spread evenly over octaves to 512."""
        limits = torch.tensor([self.image_width, self.height], device=self.device)
        centers = self.rand(*shape, 2) * limits
        half_sides = 2 ** (2 + 6 * self.rand(*shape, 2))
        corners = torch.cat([centers - half_sides, centers + half_sides], dim=-1)
        return torch.minimum(corners.clamp(min=0), limits.repeat(2))

    def grid(self, stride: int) -> tuple[int, int]:
        """H and W of the map of a stride."""
        return -(-self.height // stride), -(-self.width // stride)


def kernel_case(
    kernel: str,
    size: str,
    limit: str,
    run: Callable[[], Tensor | Sequence[Tensor]],
    inputs: Sequence[Tensor],
    peers: tuple[Peer, ...] = (),
    goal: Goal | None = None,
) -> KernelCase:
    """A case whose traffic is that of its inputs, each in full, and of what it puts out."""
    outputs = run()
    tensors = [*inputs, *([outputs] if isinstance(outputs, Tensor) else outputs)]
    megabytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6
    return KernelCase(kernel, size, limit, run, megabytes, peers, goal)
