"""What became of the requests for a model, by whatever protocol, as Triton counts it."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from threading import Lock

from ...protos.inference import open_inference_pb2 as pb
from ..detections import Timing

_Durations = Counter[str]
"""Microseconds by name."""


class Statistics:
    """Counts the requests for one model, to be read by other threads meanwhile.

    A request takes as long as its slowest image. A batch counts where its images are, so that one
    which images of others share counts for a part.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._requests = 0
        self._images = 0
        self._failures: Counter[str] = Counter()
        self._last_ms = 0
        self._durations = _Durations()
        self._batches: Counter[int] = Counter()
        """Images by the size of the batch that they were in."""
        self._batch_durations: dict[int, _Durations] = {}

    def count_success(self, timings: Sequence[Timing], elapsed_s: float) -> None:
        """Count a request that was answered.

        Args:
            timings: Of its images.
            elapsed_s: Seconds from its arrival to its answer.
        """
        with self._lock:
            self._requests += 1
            self._images += len(timings)
            self._last_ms = time.time_ns() // 1_000_000
            slowest = max(map(_durations_of, timings), key=Counter.total)
            self._durations.update(slowest, success=round(elapsed_s * 1e6))
            for timing in timings:
                self._batches[timing.batch_size] += 1
                durations = self._batch_durations.setdefault(timing.batch_size, _Durations())
                durations.update(_durations_of(timing))

    def count_failure(self, elapsed_s: float, reason: str) -> None:
        """Count a request that was refused for one of Triton's reasons, after so many seconds."""
        with self._lock:
            self._failures[reason] += 1
            self._durations.update(fail=round(elapsed_s * 1e6))

    @property
    def failures(self) -> Mapping[str, int]:
        """Requests that were refused, by reason."""
        with self._lock:
            return dict(self._failures)

    def message(self, name: str, version: str) -> pb.ModelStatistics:
        """The statistics of a model of that name and version."""
        with self._lock:
            return self._message(name, version)

    def _message(self, name: str, version: str) -> pb.ModelStatistics:
        executions = sum(images / size for size, images in self._batches.items())
        counts = dict.fromkeys(_STAGES, self._requests)
        counts |= {"success": self._requests, "fail": self._failures.total()}
        return pb.ModelStatistics(
            name=name,
            version=version,
            last_inference=self._last_ms,
            inference_count=self._images,
            execution_count=round(executions),
            inference_stats=pb.InferStatistics(
                **{n: _message(count, self._durations[n]) for n, count in counts.items()}
            ),
            batch_stats=[self._batch_message(size) for size in sorted(self._batches)],
        )

    def _batch_message(self, size: int) -> pb.InferBatchStatistics:
        images, durations = self._batches[size], self._batch_durations[size]
        # What is measured of a batch as a whole, each of its images tells.
        mean = {name: round(us / size) for name, us in durations.items()}
        executions = round(images / size)
        return pb.InferBatchStatistics(
            batch_size=size,
            **{
                name: _message(executions, mean[name])
                for name in ("compute_input", "compute_infer", "compute_output")
            },
        )


_STAGES = ("queue", "compute_input", "compute_infer", "compute_output")


def _durations_of(timing: Timing) -> _Durations:
    durations = (timing.queue_us, timing.decode_us, timing.infer_us, timing.encode_us)
    return Counter(dict(zip(_STAGES, durations, strict=True)))


def _message(count: int, us: int) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=count, ns=1000 * us)
