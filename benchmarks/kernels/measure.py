"""Measurement of the CUDA kernels: workload, cases with baselines and goals, and results."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..common.timing import GpuTimer, host_milliseconds


@dataclass(frozen=True)
class KernelBaseline:
    """Other implementation of a CUDA kernel's task, timed for comparison with the kernel."""

    name: str
    run: Callable[[], object]
    # Whether the baseline runs on the CPU, at least in part. If so, its time is measured on the
    # host's clock.
    on_host: bool = False


@dataclass(frozen=True)
class KernelGoal:
    """Goal for a kernel at one input size: maximum time, and minimum speedup over a baseline."""

    # Maximum time of one call.
    milliseconds: float
    # Minimum speedup over the first baseline. None: no goal for the speedup.
    times_peer: float | None = None


@dataclass(frozen=True)
class KernelCase:
    """Benchmark case: a kernel to measure, with inputs of one size."""

    kernel: str
    # Description of the input size.
    size: str
    # Description of the bottleneck.
    limit: str
    run: Callable[[], object]
    # Minimum memory traffic in 10^6 bytes: inputs read once, outputs written once.
    megabytes: float
    baselines: tuple[KernelBaseline, ...] = ()
    goal: KernelGoal | None = None


@dataclass(frozen=True)
class BaselineResult:
    """Time of another implementation of a kernel's task."""

    name: str
    milliseconds: float
    # Whether the time was measured on the host's clock instead of with CUDA events.
    on_host: bool


@dataclass(frozen=True)
class KernelResult:
    """Time of a kernel at one input size, with the times of its baselines."""

    kernel: str
    size: str
    limit: str
    # Median on the GPU, with caches flushed before each call.
    milliseconds: float
    # Minimum memory traffic divided by the time.
    gigabytes_per_second: float
    # Bandwidth, reads plus writes, of copying a large tensor on the same GPU.
    copy_gigabytes_per_second: float
    # Results of the baselines. The field's name is a key of the JSON file.
    peers: tuple[BaselineResult, ...] = ()
    goal: KernelGoal | None = None

    @property
    def bandwidth_share(self) -> float:
        """Kernel's memory bandwidth as a fraction of the bandwidth of copying a large tensor."""
        return self.gigabytes_per_second / self.copy_gigabytes_per_second

    @property
    def meets_goal(self) -> bool:
        """Whether the kernel meets `goal`. True if `goal` is None."""
        if self.goal is None:
            return True
        fast = self.milliseconds < self.goal.milliseconds
        if self.goal.times_peer is None:
            return fast
        return fast and self.speedup(self.peers[0]) >= self.goal.times_peer

    def speedup(self, baseline: BaselineResult) -> float:
        """Return the baseline's time divided by the kernel's time."""
        return baseline.milliseconds / self.milliseconds


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of an R-50-FPN training batch, and generator of random tensors for it."""

    device: str = "cuda"
    batch: int = 8
    # Size of the padded input in pixels.
    height: int = 800
    width: int = 1344
    # Width without padding.
    image_width: int = 1333
    # Fraction of the usual number of RoIs, candidates and instances.
    share: float = 1.0
    # Generator on the CPU, so that tensors have the same values on every device.
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def count(self, full: int) -> int:
        """Return the number of RoIs, candidates or instances in this workload, at least 1.

        It is `full`, the usual number, times the attribute `share`, rounded. A `share` below 1
        makes the workload smaller.
        """
        return max(1, round(full * self.share))

    def rand(self, *shape: int) -> Tensor:
        """Return a tensor of this shape with uniform random numbers from 0 to 1."""
        return torch.rand(shape, generator=self.generator).to(self.device)

    def randn(self, *shape: int) -> Tensor:
        """Return a tensor of this shape with random numbers of standard normal distribution."""
        return torch.randn(shape, generator=self.generator).to(self.device)

    def randint(self, end: int, *shape: int) -> Tensor:
        """Return a tensor of this shape with uniform random integers from 0 to `end - 1`."""
        return torch.randint(end, shape, generator=self.generator).to(self.device)

    def boxes(self, *shape: int) -> Tensor:
        """Return random boxes [*shape, 4], xyxy in pixels.

        Their sides are log-uniform from 8 to 512 pixels. The boxes are then clipped to the image,
        which does not include the padding.
        """
        limits = torch.tensor([self.image_width, self.height], device=self.device)
        centers = self.rand(*shape, 2) * limits
        half_sides = 2 ** (2 + 6 * self.rand(*shape, 2))
        corners = torch.cat([centers - half_sides, centers + half_sides], dim=-1)
        return torch.minimum(corners.clamp(min=0), limits.repeat(2))

    def grid(self, stride: int) -> tuple[int, int]:
        """Return the height and width of the feature map that has this stride."""
        return -(-self.height // stride), -(-self.width // stride)


def kernel_case(
    kernel: str,
    size: str,
    limit: str,
    run: Callable[[], Tensor | Sequence[Tensor]],
    inputs: Sequence[Tensor],
    *baselines: KernelBaseline,
    goal: KernelGoal | None = None,
) -> KernelCase:
    """Return a benchmark case of a kernel.

    The kernel is run once to get the size of its outputs, because outputs count as memory traffic.

    Args:
        kernel: name of the kernel.
        size: description of the input size, for tables.
        limit: description of the kernel's bottleneck, for tables.
        run: function that launches the kernel and returns its outputs.
        inputs: tensors that the kernel reads.
        baselines: other implementations of the same task.
        goal: speed that the kernel should reach. None: the kernel has no goal.
    """
    outputs = run()
    tensors = [*inputs, *([outputs] if isinstance(outputs, Tensor) else outputs)]
    megabytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6
    return KernelCase(kernel, size, limit, run, megabytes, baselines, goal)


def measure_kernels(
    cases: Iterable[KernelCase], on_case: Callable[[KernelCase], object]
) -> list[KernelResult]:
    """Measure benchmark cases on the current GPU, and return one result per case.

    Args:
        cases: Benchmark cases. A generator can create the tensors of each case lazily, because a
            case is taken from it only when the previous one has been measured.
        on_case: Function that is called before each case.
    """
    timer = GpuTimer()
    copying = timer.copy_gigabytes_per_second()
    results = []
    for case in cases:
        on_case(case)
        milliseconds = timer.milliseconds(case.run)
        baselines = []
        for baseline in case.baselines:
            measure = host_milliseconds if baseline.on_host else timer.milliseconds
            baselines.append(BaselineResult(baseline.name, measure(baseline.run), baseline.on_host))
        results.append(
            KernelResult(
                case.kernel,
                case.size,
                case.limit,
                milliseconds,
                case.megabytes / milliseconds,
                copying,
                tuple(baselines),
                case.goal,
            )
        )
    return results
