import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import faulty_engines as deeds
import numpy as np
import pytest

from maskrcnn_trt.model.manifest import read_manifest
from maskrcnn_trt.serving import batching
from maskrcnn_trt.serving.backends.base import Backend, Outputs
from maskrcnn_trt.serving.backends.loading import load_backend
from maskrcnn_trt.serving.batching import Batcher, BatchResult
from maskrcnn_trt.serving.engines.bundle_engine import BundleEngine
from maskrcnn_trt.serving.engines.engine_process import EngineProcess, start_engines
from maskrcnn_trt.serving.engines.placement import places_for
from maskrcnn_trt.serving.scheduling import BatchPolicy
from maskrcnn_trt.serving.steps.preprocessing import ModelInput, prepare_image

Encode = Callable[..., bytes]
Loaded = EngineProcess[ModelInput, Outputs]


@pytest.fixture
def backend(bundle: Path) -> Backend:
    return load_backend(bundle, read_manifest(bundle), "fp32")


@pytest.fixture
def model_input(bundle: Path, backend: Backend, picture: Encode) -> Callable[..., ModelInput]:
    preprocessing = read_manifest(bundle).preprocessing

    def prepare(seed: int = 0, size: tuple[int, int] = (120, 200)) -> ModelInput:
        return prepare_image(picture(seed, size), preprocessing, backend.buckets, 10**6)

    return prepare


def loaded(engine: Any, workers: int = 1) -> list[EngineProcess[Any, Any]]:
    processes = start_engines(engine, places_for(workers), 60)
    for process in processes:
        process.load()
    return processes


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[Loaded]:
    description = BundleEngine(bundle, read_manifest(bundle), "fp32", "onnxruntime", 4)
    (engine,) = loaded(description)
    yield engine
    engine.close()


def batcher_of(engine: Any, max_batch: int, max_delay_s: float = 0.0) -> Batcher[Any, Any]:
    return Batcher([engine], BatchPolicy(max_batch, max_delay_s))


@contextlib.asynccontextmanager
async def running(batcher: Batcher[Any, Any]) -> AsyncIterator[None]:
    task = asyncio.create_task(batcher.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def test_images_of_a_bucket_share_batches(
    engine: Loaded, backend: Backend, model_input: Callable[..., ModelInput]
) -> None:
    images = [model_input(i) for i in range(10)]
    alone = [backend.infer(i.bucket, i.pixels[None], np.array([i.size])) for i in images]

    async def compute() -> list[BatchResult[Outputs]]:
        batcher = batcher_of(engine, 4, 0.05)
        async with running(batcher):
            return await asyncio.gather(*map(batcher.infer, images))

    results = asyncio.run(compute())
    assert [r.batch_size for r in results] == [4] * 8 + [2] * 2
    for result, expected in zip(results, alone, strict=True):
        np.testing.assert_allclose(result.value.boxes, expected.boxes, rtol=0, atol=1e-2)


class Deed(partial[Any]):
    bucket = deeds.BUCKET


@pytest.mark.parametrize(("workers", "concurrency"), [(1, 2), (2, 1)])
def test_batches_overlap_on_an_engine_and_on_several(
    tmp_path: Path, workers: int, concurrency: int
) -> None:
    engines = loaded(deeds.ObedientEngine(concurrency=concurrency), workers)
    a, b, c, d = (tmp_path / name for name in "abcd")
    meetings = [Deed(deeds.meet, *pair) for pair in ((a, b), (b, a), (c, d), (d, c))]

    async def compute() -> set[int]:
        batcher = Batcher(engines, BatchPolicy(1, 0))
        async with running(batcher):
            results = await asyncio.gather(*map(batcher.infer, meetings))
        batcher.close()
        return {result.value for result in results}

    assert len(asyncio.run(compute())) == workers


def test_only_full_batches_begin_on_a_busy_engine(tmp_path: Path) -> None:
    engines = loaded(deeds.ObedientEngine(concurrency=2, busy_from=1), 1)
    a, b = tmp_path / "a", tmp_path / "b"

    async def compute() -> None:
        batcher = Batcher(engines, BatchPolicy(2, 0))
        async with running(batcher):
            first = asyncio.create_task(batcher.infer(Deed(deeds.meet, a, b)))
            while not a.exists():
                await asyncio.sleep(0.01)
            second = asyncio.create_task(batcher.infer(Deed(os.getpid)))
            await asyncio.sleep(0.1)
            assert not second.done()
            results = await asyncio.gather(second, batcher.infer(Deed(os.getpid)))
            assert [result.batch_size for result in results] == [2, 2]
            assert not first.done()
            b.touch()
            await first
        batcher.close()

    asyncio.run(compute())


def test_delay_lets_a_single_image_go(
    engine: Loaded, model_input: Callable[..., ModelInput]
) -> None:
    async def compute() -> BatchResult[Outputs]:
        batcher = batcher_of(engine, 4, 0.03)
        async with running(batcher):
            return await batcher.infer(model_input())

    result = asyncio.run(compute())
    assert result.batch_size == 1
    assert result.queue_s >= 0.03


def test_buckets_do_not_starve_each_other(
    engine: Loaded, model_input: Callable[..., ModelInput]
) -> None:
    wide = [model_input(i) for i in range(8)]
    tall = model_input(size=(200, 120))
    assert tall.bucket != wide[0].bucket
    order: list[str] = []

    async def note(batcher: Batcher[Any, Any], image: ModelInput, name: str) -> None:
        await batcher.infer(image)
        order.append(name)

    async def compute() -> None:
        batcher = batcher_of(engine, 2)
        async with asyncio.TaskGroup() as tasks:
            for image in wide[:4]:
                tasks.create_task(note(batcher, image, "wide"))
            tasks.create_task(note(batcher, tall, "tall"))
            for image in wide[4:]:
                tasks.create_task(note(batcher, image, "wide"))
            await asyncio.sleep(0)
            async with running(batcher), asyncio.timeout(60):
                while len(order) < 9:
                    await asyncio.sleep(0.01)

    asyncio.run(compute())
    assert order.index("tall") < 5


def test_an_engine_that_hangs_when_it_is_started_again_is_tried_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "LONGEST_START_S", 5.0)
    starts = tmp_path / "starts"
    (engine,) = loaded(deeds.ObedientEngine(partial(deeds.hang_at_second, starts)))

    async def compute() -> int:
        batcher = batcher_of(engine, 1)
        async with running(batcher), asyncio.timeout(60):
            engine.kill()
            while batcher.restarts == 0:
                await asyncio.sleep(0.01)
            result = await batcher.infer(Deed(os.getpid))
        batcher.close()
        return int(result.value)

    assert asyncio.run(compute())
    assert starts.stat().st_size >= 3


def test_cancelled_images_leave_the_queue(
    engine: Loaded, model_input: Callable[..., ModelInput]
) -> None:
    async def compute() -> BatchResult[Outputs]:
        batcher = batcher_of(engine, 8)
        tasks = [asyncio.create_task(batcher.infer(model_input(i))) for i in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[2].cancel()
        await asyncio.wait([tasks[0], tasks[2]])
        async with running(batcher):
            return await tasks[1]

    assert asyncio.run(compute()).batch_size == 1


def test_failed_batch_fails_its_images_only(
    engine: Loaded, model_input: Callable[..., ModelInput]
) -> None:
    good = model_input()
    bad = good._replace(pixels=good.pixels[:, :-1])

    async def compute() -> BatchResult[Outputs]:
        batcher = batcher_of(engine, 1)
        async with running(batcher):
            with pytest.raises(Exception, match="invalid dimensions"):
                await batcher.infer(bad)
            return await batcher.infer(good)

    assert asyncio.run(compute()).value.num_detections[0] > 0
