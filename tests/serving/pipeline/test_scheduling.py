"""Fair scheduling: batches of connections that are named by a letter. Deadlines of requests."""

import asyncio
import math

import pytest

from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.serving.detections import SchedulingOptions
from maskrcnn_trt.serving.errors import ExpiredError, InvalidRequestError
from maskrcnn_trt.serving.pipeline.scheduling import (
    BatchPolicy,
    Schedule,
    Ticket,
    request_deadline,
)

WIDE, TALL = ShapeBucket(96, 160), ShapeBucket(160, 96)


def schedule_of(
    max_batch: int = 4, max_delay_s: float = 0.0, preferred: tuple[int, ...] = ()
) -> Schedule[str]:
    return Schedule(BatchPolicy(max_batch, max_delay_s, preferred), (WIDE, TALL))


def add(
    schedule: Schedule[str],
    names: str,
    priority: int = 2,
    bucket: ShapeBucket = WIDE,
    now: float = 0.0,
) -> list[Ticket[str]]:
    """Queue one image per letter of `names`; the letter is its connection."""
    return [
        schedule.add(name, bucket, SchedulingOptions(peer=name, priority=priority), now)
        for name in names
    ]


def batches_of(schedule: Schedule[str], now: float = 100.0) -> list[str]:
    batches = []
    while batch := schedule.take(now):
        batches.append("".join(ticket.item for ticket in batch))
    return batches


@pytest.mark.parametrize(
    ("names", "batches"),
    [
        ("", []),
        ("a", ["a"]),
        ("aaaaa", ["aaaa", "a"]),
        ("aaaaaaaab", ["abaa", "aaaa", "a"]),
        ("aaaabbbbcccc", ["abca", "bcab", "cabc"]),
    ],
)
def test_connections_take_turns(names: str, batches: list[str]) -> None:
    schedule = schedule_of()
    add(schedule, names)
    assert batches_of(schedule) == batches


def test_a_new_connection_does_not_wait_for_a_backlog() -> None:
    schedule = schedule_of(max_batch=2)
    add(schedule, "a" * 1000)
    for _ in range(100):
        schedule.take(1.0)
    add(schedule, "b")
    assert "b" in batches_of(schedule)[0]


def test_the_higher_priority_goes_first() -> None:
    schedule = schedule_of(max_batch=3)
    for priority, name in ((3, "c"), (2, "b"), (1, "a")):
        add(schedule, name * 3, priority)
    assert batches_of(schedule) == ["aaa", "bbb", "ccc"]


def test_one_priority_lower_gets_one_image_in_nine() -> None:
    schedule = schedule_of(max_batch=1)
    taken = ""
    add(schedule, "a", priority=1)
    add(schedule, "b", priority=2)
    for _ in range(90):
        (ticket,) = schedule.take(1.0)
        taken += ticket.item
        add(schedule, ticket.item, ticket.priority)
    assert taken.count("b") == 10
    assert "b" in taken[:9]


def test_priorities_within_a_connection() -> None:
    schedule = schedule_of(max_batch=1)
    low = add(schedule, "aa", priority=3)
    (high,) = add(schedule, "a", priority=1)
    assert [schedule.take(1.0)[0] for _ in range(3)] == [high, *low]


@pytest.mark.parametrize(
    ("preferred", "waiting", "overdue", "size"),
    [
        ((), 7, False, 0),
        ((), 7, True, 7),
        ((), 8, False, 8),
        ((), 20, False, 8),
        ((4,), 3, False, 0),
        ((4,), 5, False, 4),
        ((2, 4), 5, True, 4),
        ((2, 4), 1, True, 1),
        ((2, 4), 1, False, 0),
        ((4,), 9, True, 8),
        ((), 0, True, 0),
    ],
)
def test_size_of_batches(
    preferred: tuple[int, ...], waiting: int, overdue: bool, size: int
) -> None:
    assert BatchPolicy(8, 1.0, preferred).size_of(waiting, overdue=overdue) == size


def test_images_that_complete_no_batch_do_not_affect_the_next_start() -> None:
    schedule = schedule_of(max_batch=5, preferred=(3,))
    changes = []
    for bucket in (WIDE, WIDE, WIDE, TALL, WIDE, TALL, WIDE):
        add(schedule, "a", bucket=bucket)
        changes.append(schedule.affects_next_start(bucket))
    assert changes == [True, False, True, True, True, False, True]


def test_a_batch_waits_until_its_oldest_image_is_due() -> None:
    schedule = schedule_of(max_batch=4, max_delay_s=0.5)
    assert schedule.due() is None
    add(schedule, "b", priority=2, now=10.0)
    add(schedule, "a", priority=1, now=10.2)
    assert schedule.due() == 10.5
    assert schedule.take(10.4) == []
    assert batches_of(schedule, now=10.5) == ["ab"]
    assert schedule.due() is None
    add(schedule, "aaaaa", now=11.0)
    assert batches_of(schedule, now=11.0) == ["aaaa"]  # a full batch does not wait


def test_batches_of_one_bucket_do_not_starve_another() -> None:
    schedule = schedule_of(max_batch=2)
    add(schedule, "aaaaaa", bucket=WIDE)
    add(schedule, "b", bucket=TALL)
    assert batches_of(schedule) == ["aa", "b", "aa", "aa"]


def test_a_waiting_bucket_does_not_block_others() -> None:
    schedule = schedule_of(max_batch=2, max_delay_s=1.0)
    add(schedule, "a", bucket=WIDE, now=0.0)
    add(schedule, "bb", bucket=TALL, now=0.1)
    assert batches_of(schedule, now=0.2) == ["bb"]
    assert batches_of(schedule, now=1.0) == ["a"]


def test_only_full_keeps_the_order_of_buckets() -> None:
    schedule = schedule_of(max_batch=2, max_delay_s=1.0)
    add(schedule, "a", bucket=WIDE, now=0.0)
    add(schedule, "bbbb", bucket=TALL, now=0.1)
    assert [ticket.peer for ticket in schedule.take(0.2, only_full=True)] == ["b", "b"]
    assert schedule.take(1.0, only_full=True) == []
    assert batches_of(schedule, now=1.0) == ["a", "bb"]


def test_discarded_images_do_not_affect_the_order() -> None:
    schedule = schedule_of()
    first, second, third = add(schedule, "aaa")
    schedule.discard(second)
    schedule.discard(third)
    schedule.discard(third)
    add(schedule, "b")
    add(schedule, "a")
    assert batches_of(schedule) == ["aba"]
    schedule.discard(first)
    assert schedule.take_all() == []


def test_take_all_empties_the_queue() -> None:
    schedule = schedule_of(max_delay_s=9.0)
    tickets = add(schedule, "ab") + add(schedule, "a", bucket=TALL)
    assert set(schedule.take_all()) == set(tickets)
    assert schedule.due() is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"priority": 0}, "priority is 0; it must be one of 1, 2, 3"),
        ({"priority": 4}, "priority is 4"),
        ({"timeout_s": 0.0}, r"timeout is 0\.0 s; it must be above 0"),
        ({"timeout_s": math.inf}, "timeout is inf s; it must be .* finite"),
        ({"timeout_s": math.nan}, "timeout is nan s"),
    ],
)
def test_scheduling_options_out_of_range(options: dict[str, float], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        SchedulingOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "setting"), [((1e-3, 9), "--server-timeout"), ((9, 1e-3), "--timeout-s")]
)
async def test_error_at_the_deadline_names_the_limit_that_applied(
    limits: tuple[float, float], setting: str
) -> None:
    with pytest.raises(ExpiredError, match=rf"time limit of 0\.001 s; raise .*{setting}"):
        async with request_deadline(*limits):
            await asyncio.sleep(9)
