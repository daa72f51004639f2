"""Answers of real processes, one of which dies."""

import os
from collections.abc import Iterator

import pytest

from maskrcnn_trt.benchmarks.processes import ProcessError, answers_from_process


def identify(count: int) -> Iterator[tuple[int, int]]:
    for i in range(count):
        yield i, os.getpid()


def die_after(count: int) -> Iterator[int]:
    yield from range(count)
    os._exit(3)


def test_answers_come_from_one_other_process():
    answers = list(answers_from_process(identify, 3))
    assert [i for i, _ in answers] == [0, 1, 2]
    assert len({process for _, process in answers} - {os.getpid()}) == 1


def test_answers_before_death_are_kept():
    answers = answers_from_process(die_after, 2)
    assert [next(answers), next(answers)] == [0, 1]
    with pytest.raises(ProcessError, match="its process ended with exit code 3"):
        next(answers)


def test_process_ends_with_its_reader():
    answers = answers_from_process(identify, 10**9)
    _, process = next(answers)
    answers.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
