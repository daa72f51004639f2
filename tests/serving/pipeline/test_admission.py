"""Admission slots: their distribution among connections, capacity and waiting."""

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from maskrcnn_trt.serving.errors import QueueFullError
from maskrcnn_trt.serving.pipeline.admission import AdmissionController


@contextlib.contextmanager
def reserved(admission: AdmissionController, peer: str, slots: int = 1) -> Iterator[None]:
    admission.reserve(peer, slots)
    yield
    admission.release(peer, slots)


def reserve_all(peer: str, admission: AdmissionController, held: contextlib.ExitStack) -> int:
    """Reserve slots until the connection is rejected, and return their number."""
    slots = 0
    with contextlib.suppress(QueueFullError):
        while True:
            held.enter_context(reserved(admission, peer))
            slots += 1
    return slots


@pytest.mark.parametrize(
    ("capacity", "shares"),
    [(1, [1, 0]), (2, [1, 1, 0]), (6, [5, 1, 0]), (16, [14, 1, 1, 0]), (256, [227, 25, 3, 1, 0])],
)
def test_each_connection_leaves_slots_for_the_next(capacity: int, shares: list[int]) -> None:
    admission = AdmissionController(capacity)
    with contextlib.ExitStack() as held:
        assert [reserve_all(peer, admission, held) for peer in "abcde"[: len(shares)]] == shares


def test_greedy_connections_converge_to_equal_shares() -> None:
    admission = AdmissionController(256)
    held = dict.fromkeys("ab", 0)
    for _ in range(1000):  # each finished request is followed by as many as possible
        for peer in held:
            if held[peer]:
                admission.release(peer, 1)
                held[peer] -= 1
            with contextlib.suppress(QueueFullError):
                while True:
                    admission.reserve(peer)
                    held[peer] += 1
    assert abs(held["a"] - held["b"]) < 10


def test_a_request_gets_all_its_slots_or_none() -> None:
    admission = AdmissionController(8)
    with reserved(admission, "a", 8), pytest.raises(QueueFullError, match="needs 1 "):
        admission.reserve("b")
    with reserved(admission, "a", 3):
        with pytest.raises(QueueFullError, match="5 are free and its connection holds 3;"):
            admission.reserve("a", 5)
        with reserved(admission, "b", 5):
            pass
        with pytest.raises(QueueFullError, match=r"needs 6 .* 5 are free"):
            admission.reserve("b", 6)
    with reserved(admission, "a", 8):
        pass


@pytest.mark.parametrize("wait", [False, True])
async def test_slots_are_released_after_errors(wait: bool) -> None:
    admission = AdmissionController(1)
    for _ in range(3):
        with contextlib.suppress(ZeroDivisionError):
            async with admission.acquire("a", wait=wait):
                with pytest.raises(QueueFullError, match="0 are free and its connection holds"):
                    async with admission.acquire("b"):
                        pass
                raise ZeroDivisionError


def test_capacity_follows_the_service_rate() -> None:
    admission = AdmissionController(100, max_wait_s=1.0, min_capacity=8)
    with reserved(admission, "a", 10):
        assert admission.capacity == 100
        for service_time, capacity in ((0.03, 33), (0.001, 100), (0.5, 8)):
            for _ in range(200):
                admission.observe_service_time(service_time)
            assert admission.capacity == capacity
        # The capacity fell below the slots in use.
        with pytest.raises(QueueFullError, match="0 are free and its connection holds 0"):
            admission.reserve("b")
    with reserved(admission, "b", 100):  # no image is in progress, so none has to wait
        pass


async def settle() -> None:
    """Run all tasks until they block."""
    for _ in range(5):
        await asyncio.sleep(0)


async def wait_for_slots(
    admission: AdmissionController, peer: str, slots: int = 1
) -> contextlib.AsyncExitStack:
    """Wait for slots, and return a stack that releases them when it is closed."""
    held = contextlib.AsyncExitStack()
    await held.enter_async_context(admission.acquire(peer, slots, wait=True))
    return held


async def test_waiting_requests_are_admitted_in_order() -> None:
    admission, admitted = AdmissionController(4), list[str]()

    async def take(peer: str, slots: int) -> contextlib.AsyncExitStack:
        held = await wait_for_slots(admission, peer, slots)
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
    admission.reserve("e", 4)


async def test_cancelled_waiters_let_others_pass() -> None:
    admission = AdmissionController(2)
    first = await wait_for_slots(admission, "a")
    large = asyncio.create_task(wait_for_slots(admission, "b", 2))
    small = asyncio.create_task(wait_for_slots(admission, "c"))
    await settle()
    assert not small.done()
    large.cancel()
    await (await small).aclose()
    late = asyncio.create_task(wait_for_slots(admission, "d", 2))
    await settle()
    await first.aclose()
    late.cancel()  # in the same iteration in which it is admitted
    with pytest.raises(asyncio.CancelledError):
        await late
    admission.reserve("e", 2)


async def test_the_queue_of_waiting_requests_is_bounded() -> None:
    admission = AdmissionController(2)
    with reserved(admission, "a", 2):
        waiting = [asyncio.create_task(wait_for_slots(admission, "b")) for _ in range(2)]
        await settle()
        with pytest.raises(QueueFullError, match="too many requests wait"):
            await wait_for_slots(admission, "c")
    for task in waiting:
        await (await task).aclose()
