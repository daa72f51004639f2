"""How often calls are made; how long they take is not asserted."""

from maskrcnn_trt.benchmarks.timing import calls_per_second, durations_of


def test_every_call_has_a_duration():
    calls: list[int] = []
    durations = durations_of(lambda: calls.append(1), 0.01)
    assert len(durations) == len(calls) >= 1
    assert all(duration >= 0 for duration in durations)


def test_least_number_of_calls_is_made_without_time():
    calls: list[int] = []
    assert len(durations_of(lambda: calls.append(1), 0, least=5)) == len(calls) == 5
    assert durations_of(lambda: calls.append(1), 0, least=0) == []


def test_queued_calls_are_waited_for_once_at_the_end():
    events: list[str] = []
    rate = calls_per_second(lambda: events.append("queue"), lambda: events.append("wait"), 3)
    assert events == ["queue", "queue", "queue", "wait"]
    assert rate > 0
