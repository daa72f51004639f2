"""Server with more requests than it can compute."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from in_process_server import connected, served

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.serving.client import AsyncDetectorClient
from maskrcnn_trt.serving.errors import RefusedError
from maskrcnn_trt.serving.offline import Detector

Encode = Callable[..., bytes]

_SLOTS = _BURST = 8
_BURSTS = 15


async def test_overload_computes_or_rejects_every_request(bundle: Path, picture: Encode) -> None:
    pictures = [picture(seed) for seed in range(4)]
    with contextlib.closing(Detector(bundle)) as predictor:
        results = [predictor.detect(data) for data in pictures]

    async def detect(client: AsyncDetectorClient, number: int) -> grpc.StatusCode:
        expected = results[number % 4]
        try:
            found = await client.detect(pictures[number % 4])
        except RefusedError as error:
            return error.code
        np.testing.assert_array_equal(found.labels, expected.labels)
        np.testing.assert_allclose(found.boxes, expected.boxes, atol=1e-3)
        np.testing.assert_allclose(found.scores, expected.scores, atol=1e-5)
        assert found.rles is not None
        assert len(found.rles) == len(found)
        return grpc.StatusCode.OK

    async with (
        served(bundle, queue_size=_SLOTS, max_batch=4) as address,
        AsyncDetectorClient(address, retries=0) as client,
        asyncio.TaskGroup() as group,
    ):
        tasks = []
        for _ in range(_BURSTS):
            tasks += [group.create_task(detect(client, number)) for number in range(_BURST)]
            await asyncio.sleep(0.02)
        statuses = Counter([await task for task in tasks])
        assert statuses.keys() == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
        after = [group.create_task(detect(client, number)) for number in range(_SLOTS // 2)]
        assert {await task for task in after} == {grpc.StatusCode.OK}  # all slots are free again


@pytest.mark.parametrize("is_stream", [False, True])
async def test_single_requests_beside_bursts_are_not_rejected(
    wide_bundle: Path, picture: Encode, *, is_stream: bool
) -> None:
    request = pb.DetectRequest(image=picture())
    idle = asyncio.Event()

    async def send_bursts(stub: Any) -> None:
        while not idle.is_set():
            if is_stream:
                stream = stub.DetectStream(iter([request] * 20))
                assert len([response async for response in stream]) == 20
            else:
                await asyncio.gather(*(stub.Detect(request).code() for _ in range(20)))

    async def send_single_requests(address: str) -> Counter[grpc.StatusCode]:
        async with connected(address) as stub:
            return Counter([await stub.Detect(request).code() for _ in range(3)])

    async with (
        served(wide_bundle, queue_size=_SLOTS, max_batch=4) as address,
        connected(address) as busy,
        asyncio.TaskGroup() as group,
    ):
        bursts = group.create_task(send_bursts(busy))
        clients = [send_single_requests(address) for _ in range(4)]
        assert sum(await asyncio.gather(*clients), Counter()) == {grpc.StatusCode.OK: 12}
        assert not bursts.done()
        idle.set()
