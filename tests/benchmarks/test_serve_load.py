"""When requests of an open loop are due."""

from itertools import pairwise

import numpy as np
import pytest

from maskrcnn_trt.benchmarks.serve_load import Arrivals, LoadPart, OpenLoop, Span, arrival_times

SPAN = Span(begin=100, start=110, end=160)


def part(arrivals: Arrivals, index: int = 0, count: int = 1, seed: int = 0) -> LoadPart:
    return LoadPart(
        address="",
        load=OpenLoop(40, arrivals),
        index=index,
        count=count,
        requests=[],
        span=SPAN,
        timeout_s=1,
        seed=seed,
    )


def times_of(arrivals: Arrivals, count: int, seed: int = 0) -> list[float]:
    parts = [part(arrivals, index, count, seed) for index in range(count)]
    return sorted(time for p in parts for time in arrival_times(OpenLoop(40, arrivals), p))


@pytest.mark.parametrize("count", [1, 3])
def test_constant_arrivals_have_equal_distances(count: int) -> None:
    times = times_of("constant", count)
    assert len(times) == 40 * 60
    assert times[0] == SPAN.begin
    assert [after - before for before, after in pairwise(times)] == pytest.approx([1 / 40] * 2399)


@pytest.mark.parametrize("count", [1, 3])
def test_poisson_arrivals_are_as_many_and_as_uneven_as_they_should(count: int) -> None:
    times = times_of("poisson", count)
    assert min(times) >= SPAN.begin
    assert max(times) < SPAN.end
    gaps = np.diff(times)
    assert len(times) == pytest.approx(2400, abs=4 * 2400**0.5)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # as of exponential distances
    per_second, _ = np.histogram(times, 60)
    assert per_second.var() == pytest.approx(per_second.mean(), rel=0.5)


def test_poisson_arrivals_follow_from_the_seed() -> None:
    assert times_of("poisson", 2) == times_of("poisson", 2)
    assert times_of("poisson", 2) != times_of("poisson", 2, seed=1)
    assert len(set(times_of("poisson", 2))) == len(times_of("poisson", 2))
