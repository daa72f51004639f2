"""What became of the requests for a model, by whatever protocol, as Triton counts it."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Final

from ...protos.inference import open_inference_pb2 as pb
from ..detections import Timing

_STAGES: Final = ("queue", "compute_input", "compute_infer", "compute_output")

_Durations = list[int]
"""Microseconds by the number of the stage."""


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
        self._success_us = self._fail_us = 0
        self._durations = _no_durations()
        self._batches: Counter[int] = Counter()
        """Images by the size of the batch that they were in."""
        self._batch_durations: dict[int, _Durations] = {}

    def count_success(self, timings: Sequence[Timing], elapsed_s: float) -> None:
        """Count a request that was answered.

        Args:
            timings: Of its images.
            elapsed_s: Seconds from its arrival to its answer.
        """
        by_image = [_durations_of(timing) for timing in timings]
        with self._lock:
            self._requests += 1
            self._images += len(timings)
            self._last_ms = time.time_ns() // 1_000_000
            self._success_us += round(elapsed_s * 1e6)
            _add(self._durations, max(by_image, key=sum))
            for timing, durations in zip(timings, by_image, strict=True):
                size = timing.batch_size
                self._batches[size] += 1
                _add(self._batch_durations.setdefault(size, _no_durations()), durations)

    def count_failure(self, elapsed_s: float, reason: str) -> None:
        """Count a request that was refused for one of Triton's reasons, after so many seconds."""
        with self._lock:
            self._failures[reason] += 1
            self._fail_us += round(elapsed_s * 1e6)

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
        stages = {
            name: _message(self._requests, us)
            for name, us in zip(_STAGES, self._durations, strict=True)
        }
        return pb.ModelStatistics(
            name=name,
            version=version,
            last_inference=self._last_ms,
            inference_count=self._images,
            execution_count=round(executions),
            inference_stats=pb.InferStatistics(
                success=_message(self._requests, self._success_us),
                fail=_message(self._failures.total(), self._fail_us),
                **stages,
            ),
            batch_stats=[self._batch_message(size) for size in sorted(self._batches)],
        )

    def _batch_message(self, size: int) -> pb.InferBatchStatistics:
        images, durations = self._batches[size], self._batch_durations[size]
        # What is measured of a batch as a whole, each of its images tells.
        mean = {name: round(us / size) for name, us in zip(_STAGES, durations, strict=True)}
        executions = round(images / size)
        return pb.InferBatchStatistics(
            batch_size=size,
            **{
                name: _message(executions, mean[name])
                for name in ("compute_input", "compute_infer", "compute_output")
            },
        )


def _no_durations() -> _Durations:
    return [0] * len(_STAGES)


def _durations_of(timing: Timing) -> _Durations:
    return [timing.queue_us, timing.decode_us, timing.infer_us, timing.encode_us]


def _add(totals: _Durations, durations: _Durations) -> None:
    for stage, us in enumerate(durations):
        totals[stage] += us


def _message(count: int, us: int) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=count, ns=1000 * us)
