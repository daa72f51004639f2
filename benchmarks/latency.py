"""Latency percentiles."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Latency:
    """Latencies of a sample in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def latency_from_seconds(seconds: Sequence[float]) -> Latency:
    """Summary of measured durations.

    Raises:
        ValueError: nothing was measured.
    """
    if not seconds:
        raise ValueError("no duration was measured")
    ordered = sorted(1000 * value for value in seconds)
    return Latency(
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(ordered, 50),
        p90=percentile(ordered, 90),
        p95=percentile(ordered, 95),
        p99=percentile(ordered, 99),
        max=ordered[-1],
    )


def percentile(ordered: Sequence[float], rank: int) -> float:
    """Nearest-rank percentile: the least value that `rank` per cent of all do not exceed.

    It is a value that was measured, never one between two; with fewer than 100 values p99 is their
    maximum.

    Args:
        ordered: Values from low to high, at least one.
        rank: Per cent, 1 to 100.
    """
    return ordered[math.ceil(len(ordered) * rank / 100) - 1]
