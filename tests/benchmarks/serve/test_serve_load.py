"""Arrival times of open loops, and requests on a stream that breaks."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import grpc
import numpy as np
import pytest

from maskrcnn_trt.benchmarks.serve.load import (
    Arrivals,
    ClientLoad,
    ClosedLoop,
    LoadWindow,
    OpenLoop,
    arrival_times,
    send_load,
)
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2_grpc as pb_grpc

WINDOW = LoadWindow(begin=100, start=110, end=160)


def share(arrivals: Arrivals, index: int, count: int, seed: int) -> ClientLoad:
    return ClientLoad(
        address="",
        load=OpenLoop(40, arrivals),
        index=index,
        count=count,
        requests=[],
        window=WINDOW,
        timeout_s=1,
        seed=seed,
    )


def times_of(arrivals: Arrivals, count: int, seed: int = 0) -> list[float]:
    shares = [share(arrivals, index, count, seed) for index in range(count)]
    return sorted(time for s in shares for time in arrival_times(OpenLoop(40, arrivals), s))


@pytest.mark.parametrize("count", [1, 3])
def test_constant_arrivals_have_equal_intervals(count: int) -> None:
    times = times_of("constant", count)
    assert len(times) == 40 * 60
    assert times[0] == WINDOW.begin
    assert [after - before for before, after in pairwise(times)] == pytest.approx([1 / 40] * 2399)


@pytest.mark.parametrize("count", [1, 3])
def test_poisson_arrivals_have_the_right_mean_and_variance(count: int) -> None:
    times = times_of("poisson", count)
    assert min(times) >= WINDOW.begin
    assert max(times) < WINDOW.end
    gaps = np.diff(times)
    assert len(times) == pytest.approx(2400, abs=4 * 2400**0.5)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # exponential distribution
    per_second, _ = np.histogram(times, 60)
    assert per_second.var() == pytest.approx(per_second.mean(), rel=0.5)


def test_poisson_arrivals_depend_on_the_seed() -> None:
    assert times_of("poisson", 2) == times_of("poisson", 2)
    assert times_of("poisson", 2) != times_of("poisson", 2, seed=1)
    assert len(set(times_of("poisson", 2))) == len(times_of("poisson", 2))


class _BreakingDetector(pb_grpc.DetectorServicer):
    """Servicer that answers two requests of a stream, in reverse order, and aborts at the third."""

    def DetectStream(  # noqa: N802 (named by the protocol)
        self, requests: Iterator[pb.DetectRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.DetectStreamResponse]:
        first, second = next(requests), next(requests)
        assert first.image == second.image == b"an image"
        response = pb.DetectResponse(timing=pb.Timing(infer_us=7, batch_size=2))
        yield pb.DetectStreamResponse(id=second.id, response=response)
        refusal = pb.Error(code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
        yield pb.DetectStreamResponse(id=first.id, error=refusal)
        next(requests)
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


def test_requests_end_with_their_stream() -> None:
    server: Any = grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_DetectorServicer_to_server(_BreakingDetector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    now = time.monotonic()
    log = send_load(
        ClientLoad(
            address=f"127.0.0.1:{port}",
            load=ClosedLoop(2, streamed=True),
            index=0,
            count=1,
            requests=[pb.DetectRequest(image=b"an image").SerializeToString()],
            window=LoadWindow(now, now, now + 1),
            timeout_s=5,
            seed=0,
        )
    )
    server.stop(None)
    statuses = [request.status for request in log.requests]
    assert sorted(statuses[:2]) == ["OK", "RESOURCE_EXHAUSTED"]
    assert set(statuses[2:]) == {"UNAVAILABLE"}
    assert log.requests[statuses.index("OK")].timing == (0, 0, 7, 0, 2)
