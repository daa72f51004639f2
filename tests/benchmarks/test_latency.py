import numpy as np
import pytest

from maskrcnn_trt.benchmarks.latency import Latency, latency_from_seconds, percentile


@pytest.mark.parametrize("count", [1, 2, 9, 10, 11, 99, 100, 101, 1000])
def test_percentiles_are_numpys_inverted_cdf(count: int):
    values = np.random.default_rng(count).gamma(2, size=count)
    ordered = sorted(values)
    for rank in (1, 50, 90, 99, 100):
        assert percentile(ordered, rank) == np.percentile(values, rank, method="inverted_cdf")


def test_summary_is_in_milliseconds_and_does_not_depend_on_order():
    expected = Latency(mean=50.5, p50=50.0, p90=90.0, p95=95.0, p99=99.0, max=100.0)
    seconds = [value / 1000 for value in range(1, 101)]
    found = latency_from_seconds(seconds[::-1])
    assert vars(found) == pytest.approx(vars(expected))


def test_nothing_measured_is_an_error():
    with pytest.raises(ValueError, match="no duration"):
        latency_from_seconds([])
