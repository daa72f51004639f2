from maskrcnn_trt.serving.detections import Timing
from maskrcnn_trt.serving.monitoring.metrics import ModelStatistics


def timing(batch_size: int, **durations: int) -> Timing:
    return Timing(batch_size=batch_size, **durations)


def test_no_requests() -> None:
    message = ModelStatistics().message("model", "1")
    assert (message.name, message.version) == ("model", "1")
    assert message.inference_count == message.execution_count == message.last_inference == 0
    assert message.inference_stats.success.count == message.inference_stats.success.ns == 0
    assert not message.batch_stats


def test_batch_shared_by_requests_counts_once() -> None:
    statistics = ModelStatistics()
    for _ in range(2):
        statistics.count_success([timing(4, infer_us=500), timing(4, infer_us=500)], 0.001)
    message = statistics.message("model", "1")
    assert (message.inference_count, message.execution_count) == (4, 1)
    assert message.last_inference > 0
    assert message.inference_stats.success.count == 2
    assert message.inference_stats.success.ns == 2_000_000
    assert message.inference_stats.compute_infer.ns == 1_000_000
    (batch,) = message.batch_stats
    assert (batch.batch_size, batch.compute_infer.count, batch.compute_infer.ns) == (4, 1, 500_000)


def test_durations_are_those_of_the_slowest_image() -> None:
    statistics = ModelStatistics()
    fast = timing(1, decode_us=30, queue_us=5, infer_us=100, encode_us=10)
    slow = timing(1, decode_us=20, queue_us=105, infer_us=90, encode_us=40)
    statistics.count_success([fast, slow], 0.0004)
    stats = statistics.message("model", "1").inference_stats
    stages = (stats.compute_input, stats.queue, stats.compute_infer, stats.compute_output)
    assert [stage.ns for stage in stages] == [20_000, 105_000, 90_000, 40_000]
    assert [stage.count for stage in stages] == [1, 1, 1, 1]


def test_failures_are_counted_by_reason() -> None:
    statistics = ModelStatistics()
    statistics.count_failure(0.001, "OTHER")
    statistics.count_failure(0.001, "REJECTED")
    message = statistics.message("model", "1")
    assert (message.inference_stats.fail.count, message.inference_stats.fail.ns) == (2, 2_000_000)
    assert statistics.failures == {"OTHER": 1, "REJECTED": 1}
    assert message.inference_stats.success.count == message.inference_count == 0
