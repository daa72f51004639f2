"""Property test: connections share slots, decode memory and batches on a simulated clock."""

import asyncio
import contextlib
import selectors
from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import Any, NamedTuple

from hypothesis import Phase, given, settings
from hypothesis.strategies import booleans, builds, integers, just, lists, none, sampled_from

from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.serving.detections import SchedulingOptions
from maskrcnn_trt.serving.errors import QueueFullError
from maskrcnn_trt.serving.pipeline.admission import AdmissionController
from maskrcnn_trt.serving.pipeline.scheduling import BatchPolicy, Schedule, Ticket
from maskrcnn_trt.serving.pipeline.shared_resources import DecodeMemory

BUCKETS = (ShapeBucket(96, 160), ShapeBucket(160, 96))
LENGTH_S = 40.0
# Pause of a client after a rejection.
RETRY_S = 0.25
# Shrinking an example would take minutes.
FIXED = settings(
    max_examples=12, deadline=None, phases=(Phase.reuse, Phase.generate), derandomize=True
)


class SimulatedClock(selectors.DefaultSelector):
    """Selector that advances a clock instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "all tasks wait for each other"
        if timeout > 0:
            self.now += max(1e-6, timeout)  # asyncio wakes timers within the clock's resolution
        return super().select(0)


def simulated_loop() -> asyncio.AbstractEventLoop:
    clock = SimulatedClock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now  # type: ignore[method-assign]
    return loop


def water_filling(capacity: float, demands: Mapping[str, float]) -> dict[str, float]:
    """Return the max-min fair shares: satisfy the lowest demand, divide the rest equally."""
    shares: dict[str, float] = {}
    for number, (peer, demand) in enumerate(sorted(demands.items(), key=lambda item: item[1])):
        shares[peer] = min(demand, capacity / (len(demands) - number))
        capacity -= shares[peer]
    return shares


class Client(NamedTuple):
    """Connection that keeps a number of requests in flight."""

    is_stream: bool
    # Images of each of its requests, and its requests in flight.
    images: int
    requests: int
    # Seconds between a response and the next request.
    pause_s: float = 0
    # Time limit of a request in seconds. None: no limit.
    patience_s: float | None = None
    # Bytes for decoding an image.
    size: int = 0
    bucket: int = 0


class Simulation:
    """Server with simulated decoding and inference, and the rules that hold at any time."""

    def __init__(
        self, capacity: int, clients: list[Client], policy: BatchPolicy, random: Random
    ) -> None:
        self.capacity, self.policy, self.random = capacity, policy, random
        self.clients = {str(number): client for number, client in enumerate(clients)}
        self.largest = max(client.images for client in clients)
        self.admission = AdmissionController(capacity)
        self.memory = DecodeMemory(400, threads=4)
        self.schedule = Schedule[tuple[str, asyncio.Future[None]]](policy, BUCKETS)
        self.queued = asyncio.Event()
        # Reference, by connection: slots in use and awaited, images served.
        self.held, self.awaited, self.served = Counter[str](), Counter[str](), Counter[str]()
        self.rejected = Counter[str]()
        # Average of the slots in use over the second half of the time, by connection.
        self.average: dict[str, float] = {}
        # By connection with an overdue image: images in batches since its last one, by connection.
        self.passing: dict[str, Counter[str]] = {}

    async def run(self) -> None:
        async with asyncio.timeout(100 * LENGTH_S), asyncio.TaskGroup() as tasks:
            model = tasks.create_task(self.compute_batches())
            async with asyncio.TaskGroup() as clients:
                clients.create_task(self.watch())
                for peer, client in self.clients.items():
                    for _ in range(client.requests):
                        clients.create_task(self.send_requests(peer, client))
            model.cancel()
        # Nothing is leaked.
        assert not self.held
        assert not self.awaited
        assert self.admission.in_use == self.memory.reserved == 0
        assert not list(self.schedule)
        async with (
            asyncio.timeout(1),
            self.admission.acquire("last", self.capacity),
            self.memory.reserve("last", self.memory.largest),
        ):
            pass

    async def watch(self) -> None:
        loop, samples, sums = asyncio.get_running_loop(), 0, Counter[str]()
        while loop.time() < LENGTH_S:
            await asyncio.sleep(0.1)
            for _ in range(20):  # tasks that run at this time finish first
                await asyncio.sleep(0)
            assert self.held.total() == self.admission.in_use <= self.capacity
            assert self.memory.reserved <= self.memory.largest
            if self.awaited:  # work-conserving
                assert self.held.total() + self.largest > self.capacity
            if loop.time() > LENGTH_S / 2:
                samples += 1
                sums += self.held
        self.average = {peer: total / samples for peer, total in sums.items()}

    async def send_requests(self, peer: str, client: Client) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < LENGTH_S:
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(client.patience_s):
                        await self.request(peer, client)
            except QueueFullError:
                self.rejected[peer] += 1
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(client.pause_s)

    async def request(self, peer: str, client: Client) -> None:
        slots, state = Counter({peer: client.images}), self.awaited
        state += slots
        claimed = self.held + self.awaited
        is_within_share = claimed[peer] <= water_filling(self.capacity, claimed)[peer]
        try:
            async with self.admission.acquire(peer, client.images, wait=client.is_stream):
                self.awaited -= slots
                state = self.held
                state += slots
                async with asyncio.TaskGroup() as images:
                    for _ in range(client.images):
                        images.create_task(self.detect(peer, client))
        except QueueFullError as error:
            if "too many requests wait" in str(error):  # streams wait beyond their share
                assert client.requests > 1 or len(self.clients) > self.capacity
            else:
                assert not is_within_share
            raise
        finally:
            state -= slots

    async def detect(self, peer: str, client: Client) -> None:
        async with self.memory.reserve_in_thread(peer, client.size):
            await asyncio.sleep(self.random.uniform(0.01, 0.1))
        result = asyncio.get_running_loop().create_future()
        bucket, scheduling = BUCKETS[client.bucket], SchedulingOptions(peer=peer)
        now = asyncio.get_running_loop().time()
        ticket = self.schedule.add((peer, result), bucket, scheduling, now)
        self.queued.set()
        try:
            await result
        finally:
            self.schedule.discard(ticket)

    async def compute_batches(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self.queued.clear()
            batch = self.schedule.take(loop.time())
            overdue = {t.peer for t in self.schedule if self.is_overdue(t)}
            if not batch:
                assert not overdue  # work-conserving
                due = self.schedule.due()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(due):
                        await self.queued.wait()
                continue
            peers = Counter(ticket.peer for ticket in batch)
            self.passing = {p: self.passing.get(p, Counter()) + peers for p in overdue - {*peers}}
            for peer, others in self.passing.items():  # no starvation
                is_patient = not self.clients[peer].patience_s
                assert max(others.values()) <= 10 * self.policy.max_batch or not is_patient
            await asyncio.sleep(self.random.uniform(0.2, 1.0))
            self.served += peers
            for ticket in batch:
                _, result = ticket.item
                if not result.done():
                    result.set_result(None)

    def is_overdue(self, ticket: Ticket[Any]) -> bool:
        return asyncio.get_running_loop().time() >= ticket.arrival + self.policy.max_delay_s


def simulated(capacity: int, clients: list[Client], policy: BatchPolicy, seed: int) -> Simulation:
    """Run a simulation to its end."""
    simulation = Simulation(capacity, clients, policy, Random(seed))
    with asyncio.Runner(loop_factory=simulated_loop) as runner:
        runner.run(simulation.run())
    return simulation


steady = builds(
    Client,
    is_stream=just(True),
    images=integers(1, 3),
    requests=sampled_from([1, 4, 30]),
    pause_s=just(0),
    patience_s=none(),
    size=sampled_from([0, 26, 100, 300]),
    bucket=integers(0, 1),
)
any_client = builds(
    Client,
    is_stream=booleans(),
    images=integers(1, 3),
    requests=sampled_from([1, 1, 2, 4, 30]),
    pause_s=sampled_from([0, 0.7, 3.1]),
    patience_s=none() | sampled_from([0.05, 0.5, 2.3]),
    size=sampled_from([0, 26, 100, 300]),
    bucket=integers(0, 1),
)
policies = builds(BatchPolicy, integers(1, 4), sampled_from([0, 0.05]), just(()))


@given(
    capacity=integers(3, 24),
    clients=lists(any_client, min_size=1, max_size=8),
    policy=policies,
    seed=integers(0, 2**32),
)
@FIXED
def test_rules_hold_for_any_clients(
    capacity: int, clients: list[Client], policy: BatchPolicy, seed: int
) -> None:
    simulation = simulated(capacity, clients, policy, seed)
    if len(clients) <= capacity:
        for peer, client in simulation.clients.items():
            assert client.requests > 1 or not simulation.rejected[peer]
            assert client.patience_s or simulation.served[peer]


@given(
    capacity=integers(6, 24),
    clients=lists(steady, min_size=1, max_size=6),
    policy=policies,
    seed=integers(0, 2**32),
)
@FIXED
def test_slots_are_max_min_fair_within_one_request(
    capacity: int, clients: list[Client], policy: BatchPolicy, seed: int
) -> None:
    simulation = simulated(capacity, clients, policy, seed)
    # A connection that always waits for slots has its share of those that the others leave.
    average = simulation.average
    backlogged = {peer for peer, client in simulation.clients.items() if client.requests == 30}
    demands = {peer: capacity if peer in backlogged else average[peer] for peer in average}
    for peer, share in water_filling(capacity, demands).items():
        # One request, and one slot for the average over a few rounds of the queue.
        assert abs(average[peer] - share) <= simulation.largest + 1, peer
