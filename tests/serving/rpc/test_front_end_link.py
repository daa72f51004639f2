"""Frames over real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from maskrcnn_trt.serving.rpc.front_end_link import Frame, Link

Received = list[tuple[int, int, bytes]]


class End:
    """Connected end of a link, and the frames that it has received."""

    def __init__(self) -> None:
        self.frames: Received = []
        self.link: Link

    async def connect(self, connection: socket.socket) -> None:
        self.link = await Link.connect(connection, lambda *frame: self.frames.append(frame))

    async def gets(self, count: int) -> Received:
        async with asyncio.timeout(60):
            while len(self.frames) < count:
                await asyncio.sleep(0.001)
        return self.frames


@asynccontextmanager
async def linked_ends() -> AsyncIterator[tuple[End, End]]:
    ends = End(), End()
    for end, connection in zip(ends, socket.socketpair(), strict=True):
        await end.connect(connection)
    yield ends
    for end in ends:
        end.link.close()
        await end.link.closed


async def test_frames_of_all_sizes_arrive_in_order() -> None:
    sizes = 0, 1, 100_000, 262_144, 3, 40 << 20, 262_143, 0, 262_120, 7
    sent = [
        (Frame.MESSAGE, 2**63 + number, bytes([number]) * size) for number, size in enumerate(sizes)
    ]
    async with linked_ends() as (here, there):
        for _ in range(2):  # also after a frame that enlarged the buffer
            here.frames.clear()
            for frame in sent:
                there.link.send(*frame)
            assert await here.gets(len(sent)) == sent


async def test_many_small_frames_in_both_directions() -> None:
    sent = [(Frame.OPEN, number, b"x" * (number % 1000)) for number in range(5000)]
    async with linked_ends() as ends:
        for end in ends:
            for frame in sent:
                end.link.send(*frame)
        assert await ends[0].gets(len(sent)) == sent
        assert await ends[1].gets(len(sent)) == sent


async def test_frames_that_arrive_byte_by_byte() -> None:
    connection, other = socket.socketpair()
    sent = [(Frame.OPEN, 1, b"opening"), (Frame.END, 2, b""), (Frame.MESSAGE, 1, b"m" * 50)]
    recorded, sender = End(), End()
    with other:
        await sender.connect(connection)
        for frame in sent:
            sender.link.send(*frame)
        sender.link.close()
        await sender.link.closed
        data = other.recv(10_000)
    connection, other = socket.socketpair()
    with other:
        await recorded.connect(connection)
        for byte in data:
            other.send(bytes([byte]))
            await asyncio.sleep(0)
        assert await recorded.gets(len(sent)) == sent
    await recorded.link.closed


async def test_close_sends_the_remaining_frames() -> None:
    async with linked_ends() as (here, there):
        there.link.send(Frame.MESSAGE, 1, bytes(10 << 20))
        there.link.send(Frame.CLOSED, 1)
        there.link.close()
        await here.link.closed
        assert [(kind, len(payload)) for kind, _, payload in here.frames] == [
            (Frame.MESSAGE, 10 << 20),
            (Frame.CLOSED, 0),
        ]


async def test_frames_to_a_closed_peer_are_dropped() -> None:
    async with linked_ends() as (here, there):
        there.link.close()
        here.link.send(Frame.MESSAGE, 1, bytes(10 << 20))
        await here.link.closed
        here.link.send(Frame.READ, 1)
        await asyncio.sleep(0)


async def test_incomplete_frame_of_a_closed_peer_is_dropped() -> None:
    connection, other = socket.socketpair()
    end = End()
    await end.connect(connection)
    with other:
        other.send(b"\0" * 5)
    await end.link.closed
    assert end.frames == []
