"""Calls that are made and percentiles; durations themselves are not asserted."""

import numpy as np
import pytest

from maskrcnn_trt.benchmarks.common.timing import (
    Latency,
    latency_from_seconds,
    measure_call_rate,
    measure_durations,
    percentile,
)


def test_every_call_has_a_duration():
    calls: list[int] = []
    durations = measure_durations(lambda: calls.append(1), 0.01)
    assert len(durations) == len(calls) >= 1
    assert all(duration >= 0 for duration in durations)
    assert len(measure_durations(lambda: None, 0, min_calls=5)) == 5
    assert measure_durations(lambda: None, 0, min_calls=0) == []


def test_queued_calls_are_synchronized_once():
    events: list[str] = []
    rate = measure_call_rate(lambda: events.append("call"), lambda: events.append("wait"), 3)
    assert events == ["call", "call", "call", "wait"]
    assert rate > 0


@pytest.mark.parametrize("count", [1, 2, 9, 10, 11, 99, 100, 101, 1000])
def test_percentiles_are_numpys_inverted_cdf(count: int):
    values = np.random.default_rng(count).gamma(2, size=count)
    ordered = sorted(values)
    for rank in (1, 50, 90, 99, 100):
        assert percentile(ordered, rank) == np.percentile(values, rank, method="inverted_cdf")


def test_latency_is_in_milliseconds_and_independent_of_order():
    expected = Latency(mean=50.5, p50=50.0, p90=90.0, p95=95.0, p99=99.0, max=100.0)
    seconds = [value / 1000 for value in range(1, 101)]
    assert vars(latency_from_seconds(seconds[::-1])) == pytest.approx(vars(expected))
    with pytest.raises(ValueError, match="no duration"):
        latency_from_seconds([])
