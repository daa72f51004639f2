"""Batches pass the steps of a chain in sections."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from maskrcnn_trt.serving.engines.base import Step, StepChain

BATCHES = 12


class RecordedSteps:
    """Steps that record when each batch enters and leaves them. A batch is a number."""

    def __init__(self, *layout: tuple[str, int, bool]) -> None:
        self.events: list[tuple[str, int, str]] = []
        self.steps = tuple(
            Step(name, self._recorder(name), threads, continues_section=continues)
            for name, threads, continues in layout
        )
        self.concurrency = BATCHES

    def _recorder(self, name: str):  # type: ignore[no-untyped-def]
        def run(batch: int) -> int:
            if batch == BATCHES:
                raise MemoryError(name)
            self.events.append((name, batch, "enter"))
            time.sleep(0.002)
            self.events.append((name, batch, "leave"))
            return batch

        return run

    def synchronize(self) -> None:
        self.events.append(("all", BATCHES, "synchronize"))


class Interval(NamedTuple):
    start: int
    end: int


def run_all(steps: RecordedSteps) -> None:
    chain = StepChain(steps)
    with ThreadPoolExecutor(BATCHES) as threads:
        assert list(threads.map(chain, range(BATCHES))) == list(range(BATCHES))  # type: ignore[arg-type]


def intervals(steps: RecordedSteps, names: Sequence[str]) -> list[Interval]:
    """Return for each batch the interval from the first of the named steps to the last."""
    own = [[e for e in steps.events if e[0] in names and e[1] == n] for n in range(BATCHES)]
    return [Interval(steps.events.index(e[0]), steps.events.index(e[-1])) for e in own]


def largest_overlap(spans: Sequence[Interval]) -> int:
    return max(sum(o.start <= own.start <= o.end for o in spans) for own in spans)


def test_one_batch_at_a_time_in_a_section_of_several_steps() -> None:
    steps = RecordedSteps(("read", BATCHES, False), ("queue", 1, False), ("paste", 1, True))
    run_all(steps)
    assert largest_overlap(intervals(steps, ["queue", "paste"])) == 1


def test_single_steps_admit_their_number_of_batches() -> None:
    steps = RecordedSteps(("decode", 3, False), ("model", 1, False), ("encode", BATCHES, False))
    run_all(steps)
    assert 1 < largest_overlap(intervals(steps, ["decode"])) <= 3
    assert largest_overlap(intervals(steps, ["model"])) == 1
    # Without a section, the next batch enters a step as soon as the previous one has left it.
    assert largest_overlap(intervals(steps, ["decode", "model"])) > 3
    assert threading.active_count() < BATCHES


def test_a_failed_step_waits_for_queued_work() -> None:
    """Other steps may use the memory of the batch, which is freed with the error."""
    steps = RecordedSteps(("read", 1, False), ("queue", 1, False))
    with pytest.raises(MemoryError, match="read"):
        StepChain(steps)(BATCHES)  # type: ignore[arg-type]
    assert steps.events == [("all", BATCHES, "synchronize")]
    run_all(steps)
