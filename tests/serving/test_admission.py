"""Who gets how many places among the images in progress."""

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from maskrcnn_trt.serving.admission import Places
from maskrcnn_trt.serving.errors import QueueFullError


@contextlib.contextmanager
def taken(places: Places, peer: str, number: int = 1) -> Iterator[None]:
    places.take(peer, number)
    yield
    places.give_back(peer, number)


def taken_by(peer: str, places: Places, held: contextlib.ExitStack) -> int:
    """Places that a connection gets until it is refused."""
    number = 0
    with contextlib.suppress(QueueFullError):
        while True:
            held.enter_context(taken(places, peer))
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
                stack.enter_context(taken(places, peer))
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
    with taken(places, "a", 8), pytest.raises(QueueFullError, match="takes 1 of"):
        places.take("b")
    with taken(places, "a", 3):
        with pytest.raises(QueueFullError, match="5 are free and its connection holds 3;"):
            places.take("a", 5)
        with taken(places, "b", 5):
            pass
        with pytest.raises(QueueFullError, match=r"takes 6 of .* 5 are free"):
            places.take("b", 6)
    with taken(places, "a", 8):
        pass


@pytest.mark.parametrize("in_turn", [False, True])
def test_places_come_back_whatever_happens(in_turn: bool) -> None:
    places = Places(1)

    async def ask() -> None:
        for _ in range(3):
            with contextlib.suppress(ZeroDivisionError):
                async with places.hold("a", in_turn=in_turn):
                    with pytest.raises(QueueFullError, match="0 are free and its connection holds"):
                        async with places.hold("b"):
                            pass
                    raise ZeroDivisionError

    asyncio.run(ask())


def test_no_more_places_than_images_that_are_computed_in_time() -> None:
    places = Places(100, max_wait_s=1.0, least=8)
    with taken(places, "a"):
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
    with taken(places, "a", 10):
        for _ in range(200):
            places.observe(1.0)
        with pytest.raises(QueueFullError, match="0 are free and its connection holds 0"):
            places.take("b")
    with taken(places, "b", 20):  # nothing is in progress, so that this need not wait
        pass


async def settled() -> None:
    """Let all tasks go as far as they can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def waiting_for(places: Places, peer: str, number: int = 1) -> contextlib.AsyncExitStack:
    """What holds places that were waited for, until it is closed."""
    held = contextlib.AsyncExitStack()
    await held.enter_async_context(places.hold(peer, number, in_turn=True))
    return held


def test_who_waits_for_places_gets_them_in_turn() -> None:
    places, admitted = Places(4), list[str]()

    async def take(peer: str, number: int) -> contextlib.AsyncExitStack:
        held = await waiting_for(places, peer, number)
        admitted.append(peer)
        return held

    async def ask() -> None:
        first = await take("a", 4)
        waiting = [asyncio.create_task(take(*one)) for one in (("b", 3), ("c", 1), ("d", 1))]
        await settled()
        assert admitted == ["a"]
        await first.aclose()
        await settled()
        assert admitted == ["a", "b", "c"]  # d would go before none, but there is no place left
        await (await waiting[1]).aclose()
        await settled()
        assert admitted == ["a", "b", "c", "d"]
        for task in (waiting[0], waiting[2]):
            await (await task).aclose()
        places.take("e", 4)

    asyncio.run(ask())


def test_who_stops_waiting_gives_way() -> None:
    places = Places(2)

    async def ask() -> None:
        first = await waiting_for(places, "a")
        large = asyncio.create_task(waiting_for(places, "b", 2))
        small = asyncio.create_task(waiting_for(places, "c"))
        await settled()
        assert not small.done()
        large.cancel()
        await (await small).aclose()
        late = asyncio.create_task(waiting_for(places, "d", 2))
        await settled()
        await first.aclose()
        late.cancel()  # at the moment at which it is admitted
        with pytest.raises(asyncio.CancelledError):
            await late
        places.take("e", 2)

    asyncio.run(ask())


def test_no_more_wait_than_there_are_places() -> None:
    places = Places(2)

    async def ask() -> None:
        with taken(places, "a", 2):
            waiting = [asyncio.create_task(waiting_for(places, "b")) for _ in range(2)]
            await settled()
            with pytest.raises(QueueFullError, match="as many requests wait"):
                await waiting_for(places, "c")
        for task in waiting:
            await (await task).aclose()

    asyncio.run(ask())
