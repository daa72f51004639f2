"""What became of the requests for a model, as Triton counts it."""

import time
from collections import Counter
from collections.abc import Sequence

from ...protos.inference import open_inference_pb2 as pb
from ..detections import Timing

_Durations = Counter[str]
"""Microseconds by name."""


class Statistics:
    """Counts the requests of this protocol for one model.

    A request takes as long as its slowest image. A batch counts where its images are, so that one
    which images of others share counts for a part.
    """

    def __init__(self) -> None:
        self._requests = 0
        self._images = 0
        self._failures = 0
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
        self._requests += 1
        self._images += len(timings)
        self._last_ms = time.time_ns() // 1_000_000
        slowest = max(map(_durations_of, timings), key=Counter.total)
        self._durations.update(slowest, success=round(elapsed_s * 1e6))
        for timing in timings:
            self._batches[timing.batch_size] += 1
            durations = self._batch_durations.setdefault(timing.batch_size, _Durations())
            durations.update(_durations_of(timing))

    def count_failure(self, elapsed_s: float) -> None:
        """Count a request that was refused, after so many seconds."""
        self._failures += 1
        self._durations.update(fail=round(elapsed_s * 1e6))

    def message(self, name: str, version: str) -> pb.ModelStatistics:
        """The statistics of a model of that name and version."""
        executions = sum(images / size for size, images in self._batches.items())
        counts = dict.fromkeys(_STAGES, self._requests)
        counts |= {"success": self._requests, "fail": self._failures}
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
