"""Who gets how many places among the images in progress."""

import asyncio
import contextlib

import pytest

from maskrcnn_trt.serving.admission import Places
from maskrcnn_trt.serving.errors import QueueFullError


def taken_by(peer: str, places: Places, held: contextlib.ExitStack) -> int:
    """Places that a connection gets until it is refused."""
    number = 0
    with contextlib.suppress(QueueFullError):
        while True:
            held.enter_context(places.hold(peer))
            number += 1
    return number


@pytest.mark.parametrize(
    ("number", "shares"),
    [(1, [1, 0]), (2, [1, 1, 0]), (6, [5, 1, 0]), (16, [14, 1, 1, 0]), (256, [227, 25, 3, 1, 0])],
)
def test_places_are_shared_out(number: int, shares: list[int]) -> None:
    places = Places(number)
    with contextlib.ExitStack() as held:
        assert [taken_by(peer, places, held) for peer in "abcde"[: len(shares)]] == shares


def test_greedy_connections_come_to_hold_as_many_places() -> None:
    places = Places(256)
    held = {peer: [contextlib.ExitStack()] for peer in "ab"}

    def grow(peer: str) -> None:
        with contextlib.suppress(QueueFullError):
            while True:
                stack = contextlib.ExitStack()
                stack.enter_context(places.hold(peer))
                held[peer].append(stack)

    for _ in range(1000):  # requests are answered in turn, and followed by as many as can be
        for peer in held:
            if held[peer]:
                held[peer].pop().close()
            grow(peer)
    assert abs(len(held["a"]) - len(held["b"])) < 10
    for stack in [*held["a"], *held["b"]]:
        stack.close()


def test_a_request_gets_all_its_places_or_none() -> None:
    places = Places(8)
    with places.hold("a", 8), pytest.raises(QueueFullError, match="takes 1 of"):
        places.hold("b").__enter__()
    with places.hold("a", 3):
        with pytest.raises(QueueFullError, match="5 are free and its connection holds 3;"):
            places.hold("a", 5).__enter__()
        with places.hold("b", 5):
            pass
        with pytest.raises(QueueFullError, match=r"takes 6 of .* 5 are free"):
            places.hold("b", 6).__enter__()
    with places.hold("a", 8):
        pass


def test_places_come_back_whatever_happens() -> None:
    places = Places(1)
    for _ in range(3):
        with contextlib.suppress(ZeroDivisionError), places.hold("a"):
            raise ZeroDivisionError
    with (
        places.hold("a"),
        pytest.raises(QueueFullError, match="0 are free and its connection holds 0;"),
    ):
        places.hold("b").__enter__()


def test_no_more_places_than_images_that_are_computed_in_time() -> None:
    places = Places(100, max_wait_s=1.0, least=8)
    with places.hold("a"):
        assert places.number == 100
        for _ in range(200):
            places.observe(0.03)
        assert places.number == 33
        for _ in range(200):
            places.observe(0.5)
        assert places.number == 8
        for _ in range(200):
            places.observe(0.001)
        assert places.number == 100


def test_places_in_use_may_become_fewer() -> None:
    places = Places(20, max_wait_s=1.0, least=2)
    with places.hold("a", 10):
        for _ in range(200):
            places.observe(1.0)
        with pytest.raises(QueueFullError, match="0 are free and its connection holds 0"):
            places.hold("b").__enter__()
    with places.hold("b", 20):  # nothing is in progress, so that this need not wait
        pass


async def settled() -> None:
    """Let all tasks go as far as they can."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_who_waits_for_places_gets_them_in_turn() -> None:
    places, admitted = Places(4), list[str]()

    async def take(peer: str, number: int) -> contextlib.ExitStack:
        held = await places.wait(peer, number)
        admitted.append(peer)
        return held

    async def ask() -> None:
        first = await take("a", 4)
        waiting = [asyncio.create_task(take(*one)) for one in (("b", 3), ("c", 1), ("d", 1))]
        await settled()
        assert admitted == ["a"]
        first.close()
        await settled()
        assert admitted == ["a", "b", "c"]  # d would go before none, but there is no place left
        (await waiting[1]).close()
        await settled()
        assert admitted == ["a", "b", "c", "d"]
        for task in (waiting[0], waiting[2]):
            (await task).close()
        with places.hold("e", 4):
            pass

    asyncio.run(ask())


def test_who_stops_waiting_gives_way() -> None:
    places = Places(2)

    async def ask() -> None:
        first = await places.wait("a")
        large = asyncio.create_task(places.wait("b", 2))
        small = asyncio.create_task(places.wait("c"))
        await settled()
        assert not small.done()
        large.cancel()
        (await small).close()
        late = asyncio.create_task(places.wait("d", 2))
        await settled()
        first.close()
        late.cancel()  # at the moment at which it is admitted
        with pytest.raises(asyncio.CancelledError):
            await late
        with places.hold("e", 2):
            pass

    asyncio.run(ask())


def test_no_more_wait_than_there_are_places() -> None:
    places = Places(2)

    async def ask() -> None:
        with places.hold("a", 2):
            waiting = [asyncio.create_task(places.wait("b")) for _ in range(2)]
            await settled()
            with pytest.raises(QueueFullError, match="as many requests wait"):
                await places.wait("c")
        for task in waiting:
            (await task).close()

    asyncio.run(ask())
