"""Admission slots and open calls: their distribution among connections, capacity and waiting."""

import asyncio
import contextlib
import itertools
from collections import Counter
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis.strategies import booleans, builds, integers, lists, randoms

from maskrcnn_trt.serving.errors import QueueFullError
from maskrcnn_trt.serving.pipeline.admission import AdmissionController
from maskrcnn_trt.serving.pipeline.shared_resources import OpenCalls


async def settle() -> None:
    """Run all tasks until they block."""
    for _ in range(5):
        await asyncio.sleep(0)


async def acquired(
    admission: AdmissionController, peer: str, slots: int = 1, *, wait: bool = False
) -> contextlib.AsyncExitStack:
    """Acquire slots, and return a stack that releases them when it is closed."""
    held = contextlib.AsyncExitStack()
    await held.enter_async_context(admission.acquire(peer, slots, wait=wait))
    return held


async def test_a_connection_with_one_request_waits_for_the_next_slot() -> None:
    admission = AdmissionController(16)
    bursts = [await acquired(admission, "burst") for _ in range(16)]
    with pytest.raises(QueueFullError, match="16 of 16 admission slots"):
        await acquired(admission, "burst")
    waiting = [asyncio.create_task(acquired(admission, peer)) for peer in "abcd"]
    await settle()
    assert not any(task.done() for task in waiting)
    for number, task in enumerate(waiting):
        await bursts[number].aclose()
        with pytest.raises(QueueFullError):  # the freed slot is not for the connection with most
            await acquired(admission, "burst")
        held = await task
        assert admission.in_use == 16
        waiting[number] = asyncio.create_task(asyncio.sleep(0, held))


async def test_unary_requests_beyond_the_share_are_rejected() -> None:
    admission = AdmissionController(8)
    held = [await acquired(admission, "a") for _ in range(8)]
    waiting = [asyncio.create_task(acquired(admission, "b")) for _ in range(4)]
    await settle()
    with pytest.raises(QueueFullError, match=r"by 2 conn.*needs 1 slot, .*waits for 4;.*queue"):
        await acquired(admission, "b")
    for task in waiting:
        task.cancel()
    await settle()
    # Any number of slots for the only request of a connection.
    large = asyncio.create_task(acquired(admission, "c", 8))
    await settle()
    assert not large.done()
    for one in held:
        await one.aclose()
    await (await large).aclose()


async def test_more_connections_than_slots() -> None:
    admission = AdmissionController(2)
    held = [await acquired(admission, peer) for peer in "ab"]
    with pytest.raises(QueueFullError, match="shared by 3 connections"):
        admission.check("c")
    await held[0].aclose()
    admission.check("c")


class Connection(NamedTuple):
    """Simulated connection."""

    is_stream: bool
    # Slots of each of its requests.
    slots: int
    # Requests that it sends at a time, and pause between two times, in steps.
    burst: int
    pause: int


class Simulation:
    """Connections that share slots on a simulated clock, and the rules that must hold."""

    def __init__(self, capacity: int, connections: list[Connection]) -> None:
        self.capacity = capacity
        self.connections = connections
        self.admission = AdmissionController(capacity)
        # Expected state: slots in use and waiting requests by connection.
        self.held, self.waiting = Counter[str](), Counter[str]()
        self.running: list[tuple[str, int, asyncio.Event]] = []
        # Requests of other connections that were admitted while a connection that holds nothing
        # was waiting, by both connections.
        self.overtaking: dict[str, Counter[str]] = {}
        self.tasks = list[asyncio.Task[None]]()

    async def request(self, peer: str, connection: Connection) -> None:
        active = {*self.held, *self.waiting, peer}
        is_only = not self.held[peer] and not self.waiting[peer]
        end = asyncio.Event()
        self.waiting[peer] += 1
        if not self.held[peer]:
            self.overtaking.setdefault(peer, Counter())
        try:
            async with self.admission.acquire(peer, connection.slots, wait=connection.is_stream):
                self.admit(peer, connection.slots, end)
                await end.wait()
        except QueueFullError:
            others = self.waiting.total() - 1
            self.waiting -= Counter([peer])
            if not self.waiting[peer]:
                self.overtaking.pop(peer, None)
            if connection.is_stream:
                assert others >= self.capacity
                return
            assert not (is_only and len(active) <= self.capacity)

    def admit(self, peer: str, slots: int, end: asyncio.Event) -> None:
        # Max-min fair: of all waiting connections, it holds the fewest slots.
        assert all(self.held[peer] <= self.held[other] for other in self.waiting)
        # No starvation: each connection overtakes another one at most once.
        self.overtaking.pop(peer, None)
        for other, admitted in self.overtaking.items():
            admitted[peer] += 1
            assert admitted[peer] <= 1, other
        self.waiting -= Counter([peer])
        self.held[peer] += slots
        if self.waiting[peer] and not self.held[peer]:
            self.overtaking[peer] = Counter()
        self.running.append((peer, slots, end))

    async def end_one(self, random: Random) -> None:
        if not self.running:
            return
        peer, slots, end = self.running.pop(random.randrange(len(self.running)))
        self.held -= Counter({peer: slots})
        if self.waiting[peer] and not self.held[peer]:
            self.overtaking.setdefault(peer, Counter())
        end.set()
        await settle()
        self.check()

    def check(self) -> None:
        in_use = sum(self.held.values())
        assert in_use == self.admission.in_use <= self.capacity
        if self.waiting:  # work-conserving
            assert (
                in_use + max(self.connections[int(p)].slots for p in self.waiting) > self.capacity
            )

    async def run(self, steps: int, completions: int, random: Random) -> None:
        for step in range(steps):
            for index, connection in enumerate(self.connections):
                if step % (connection.pause + 1):
                    continue
                for _ in range(connection.burst):
                    self.tasks.append(asyncio.create_task(self.request(str(index), connection)))
            await settle()
            self.check()
            for _ in range(completions):
                await self.end_one(random)
        while self.running:
            await self.end_one(random)
        for task in self.tasks:
            task.result()  # not `await`: a request that is never admitted would block the test
        assert not self.held
        assert not self.waiting


@given(
    capacity=integers(3, 20),
    connections=lists(
        builds(Connection, booleans(), integers(1, 3), integers(1, 4), integers(0, 3)),
        min_size=1,
        max_size=6,
    ),
    completions=integers(0, 5),
    random=randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_slots_are_max_min_fair(
    capacity: int, connections: list[Connection], completions: int, random: Random
) -> None:
    asyncio.run(Simulation(capacity, connections).run(8, completions, random))


@pytest.mark.parametrize("wait", [False, True])
async def test_slots_are_released_after_errors(wait: bool) -> None:
    admission = AdmissionController(1)
    for _ in range(3):
        with contextlib.suppress(ZeroDivisionError):
            async with admission.acquire("a", wait=wait):
                with pytest.raises(QueueFullError, match=r"1 of 1 admission slots.* waits for 1;"):
                    async with admission.acquire("a"):
                        pass
                raise ZeroDivisionError


async def test_capacity_follows_the_service_rate() -> None:
    admission = AdmissionController(100, max_wait_s=1.0, min_capacity=8)
    held = await acquired(admission, "a", 10)
    assert admission.capacity == 100
    for service_time, capacity in ((0.03, 33), (0.001, 100), (0.5, 8)):
        for _ in range(200):
            admission.observe_service_time(service_time)
        assert admission.capacity == capacity
    # The capacity fell below the slots in use.
    with pytest.raises(QueueFullError, match=r"10 of 8 admission slots.*max-wait-s"):
        await acquired(admission, "a")
    await held.aclose()
    await acquired(admission, "b", 100)  # no image is in progress, so none has to wait


async def test_waiting_requests_are_admitted_in_order() -> None:
    admission, admitted = AdmissionController(4), list[str]()

    async def take(peer: str, slots: int) -> contextlib.AsyncExitStack:
        held = await acquired(admission, peer, slots, wait=True)
        admitted.append(peer)
        return held

    first = await take("a", 4)
    waiting = [asyncio.create_task(take(*one)) for one in (("b", 3), ("c", 1), ("d", 1))]
    await settle()
    assert admitted == ["a"]
    await first.aclose()
    await settle()
    assert admitted == ["a", "b", "c"]  # no slot is left for d
    await (await waiting[1]).aclose()
    await settle()
    assert admitted == ["a", "b", "c", "d"]
    for task in (waiting[0], waiting[2]):
        await (await task).aclose()
    await acquired(admission, "e", 4)


async def test_cancelled_waiters_let_others_pass() -> None:
    admission = AdmissionController(2)
    first = await acquired(admission, "a", wait=True)
    large = asyncio.create_task(acquired(admission, "b", 2, wait=True))
    small = asyncio.create_task(acquired(admission, "c", wait=True))
    await settle()
    assert not small.done()
    large.cancel()
    await (await small).aclose()
    late = asyncio.create_task(acquired(admission, "d", 2, wait=True))
    await settle()
    await first.aclose()
    late.cancel()  # in the same iteration in which it is admitted
    with pytest.raises(asyncio.CancelledError):
        await late
    await acquired(admission, "e", 2)


async def test_the_queue_of_waiting_requests_is_bounded() -> None:
    admission = AdmissionController(2)
    held = [await acquired(admission, "a") for _ in range(2)]
    first, second = (asyncio.create_task(acquired(admission, "b", wait=True)) for _ in range(2))
    await settle()
    with pytest.raises(QueueFullError, match="too many requests wait"):
        await acquired(admission, "b", wait=True)
    other = asyncio.create_task(acquired(admission, "c", wait=True))
    await settle()
    with pytest.raises(QueueFullError, match="too many requests wait"):
        await second  # the newest request of the connection with the most
    with pytest.raises(QueueFullError, match="too many requests wait"):
        await acquired(admission, "d", wait=True)
    for one in held:
        await one.aclose()
    for task in (first, other):
        await (await task).aclose()


def open_all(peer: str, calls: OpenCalls) -> int:
    """Open calls until one is rejected, and return their number."""
    for number in itertools.count():
        try:
            calls.add(peer)
        except QueueFullError:
            return number
    raise AssertionError


@pytest.mark.parametrize(
    ("limit", "shares"),
    [(1, [1, 0]), (2, [1, 1, 0]), (6, [5, 1, 0]), (16, [14, 1, 1, 0]), (256, [227, 25, 3, 1, 0])],
)
def test_each_connection_leaves_open_calls_for_the_next(limit: int, shares: list[int]) -> None:
    calls = OpenCalls(limit)
    assert [open_all(peer, calls) for peer in "abcde"[: len(shares)]] == shares
    for peer, number in zip("abcde", shares, strict=False):
        for _ in range(number):
            calls.remove(peer)
    assert open_all("f", calls) == shares[0]
