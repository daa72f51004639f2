"""Time of each CUDA kernel at working sizes, and of what others offer for the same task."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Peer:
    """What others offer for a task."""

    name: str
    run: Callable[[], object]
    on_host: bool = False
    """Works on the CPU, at least in part."""


@dataclass(frozen=True)
class Goal:
    """What a kernel is meant to reach."""

    milliseconds: float
    """It takes less."""
    times_peer: float | None = None
    """It is at least so many times as fast as the first peer."""


@dataclass(frozen=True)
class KernelCase:
    """A task at a working size."""

    kernel: str
    size: str
    """In words."""
    limit: str
    """What binds the kernel, in words."""
    run: Callable[[], object]
    megabytes: float
    """Least memory traffic: inputs read once, outputs written once, 10^6 bytes."""
    peers: tuple[Peer, ...] = ()
    goal: Goal | None = None


@dataclass(frozen=True)
class PeerResult:
    """A measured peer."""

    name: str
    milliseconds: float
    on_host: bool
    """Timed by the host's clock, not the device's."""


@dataclass(frozen=True)
class KernelResult:
    """A measured case."""

    kernel: str
    size: str
    limit: str
    milliseconds: float
    """Median on the device, with caches flushed before each call."""
    gigabytes_per_second: float
    """Least traffic by time."""
    copy_gigabytes_per_second: float
    """Reads and writes of copying a large tensor on the same GPU."""
    peers: tuple[PeerResult, ...] = ()
    goal: Goal | None = None

    @property
    def bandwidth_share(self) -> float:
        """Least traffic by time, as a share of what copying reaches."""
        return self.gigabytes_per_second / self.copy_gigabytes_per_second

    @property
    def meets_goal(self) -> bool:
        """Whether there is no goal or it is reached."""
        if self.goal is None:
            return True
        fast = self.milliseconds < self.goal.milliseconds
        if self.goal.times_peer is None:
            return fast
        return fast and self.times(self.peers[0]) >= self.goal.times_peer

    def times(self, peer: PeerResult) -> float:
        """How many times as fast as a peer the kernel is."""
        return peer.milliseconds / self.milliseconds


def measure_kernels(
    cases: Iterable[KernelCase], on_case: Callable[[KernelCase], object] = lambda case: None
) -> list[KernelResult]:
    """Measure cases one after the other on the current GPU.

    Args:
        cases: each is let go of before the next is taken.
        on_case: called before each is measured.
    """
    from .device_timing import DeviceTimer, host_milliseconds

    timer = DeviceTimer()
    copying = timer.copy_gigabytes_per_second()
    results = []
    for case in cases:
        on_case(case)
        milliseconds = timer.milliseconds(case.run)
        peers = []
        for peer in case.peers:
            clock = host_milliseconds if peer.on_host else timer.milliseconds
            peers.append(PeerResult(peer.name, clock(peer.run), peer.on_host))
        results.append(
            KernelResult(
                case.kernel,
                case.size,
                case.limit,
                milliseconds,
                case.megabytes / milliseconds,
                copying,
                tuple(peers),
                case.goal,
            )
        )
    return results
