"""Server with more requests than it can compute."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np

from maskrcnn_trt.serving.client import AsyncDetectorClient
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.detections import Detections
from maskrcnn_trt.serving.errors import RefusedError
from maskrcnn_trt.serving.offline.predictor import Predictor
from maskrcnn_trt.serving.server import detection_server

Encode = Callable[..., bytes]

_PICTURES = 4
_BURSTS = 15
_BURST = 8
_SLOTS = 8


def test_overload_computes_or_rejects_every_request(bundle: Path, picture: Encode) -> None:
    pictures = [picture(seed) for seed in range(_PICTURES)]
    predictor = Predictor(bundle)
    expected = [predictor.detect(data) for data in pictures]
    predictor.close()

    async def detect(client: AsyncDetectorClient, number: int) -> grpc.StatusCode:
        try:
            found = await client.detect(pictures[number % _PICTURES])
        except RefusedError as error:
            return error.code
        _check_equal(found, expected[number % _PICTURES])
        return grpc.StatusCode.OK

    async def overload() -> tuple[Counter[grpc.StatusCode], list[grpc.StatusCode]]:
        config = ServeConfig(port=0, queue_size=_SLOTS, max_batch=4)
        async with (
            detection_server(bundle, config) as address,
            AsyncDetectorClient(address, retries=0) as client,
        ):
            tasks = []
            for _ in range(_BURSTS):
                tasks += [
                    asyncio.create_task(detect(client, len(tasks) + i)) for i in range(_BURST)
                ]
                await asyncio.sleep(0.02)
            statuses = Counter(await asyncio.gather(*tasks))
            after = await asyncio.gather(*(detect(client, i) for i in range(_SLOTS // 2)))
            return statuses, after

    statuses, after = asyncio.run(overload())
    assert statuses.keys() == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert statuses.total() == _BURSTS * _BURST
    assert after == [grpc.StatusCode.OK] * (_SLOTS // 2)  # all slots are free again


def _check_equal(found: Detections, expected: Detections) -> None:
    np.testing.assert_array_equal(found.labels, expected.labels)
    np.testing.assert_allclose(found.boxes, expected.boxes, atol=1e-3)
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-5)
    assert found.rles is not None
    assert len(found.rles) == len(found)
