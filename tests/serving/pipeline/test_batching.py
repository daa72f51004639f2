import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import faulty_engines as actions
import numpy as np
import pytest

from maskrcnn_trt.model.bundle.manifest import read_manifest
from maskrcnn_trt.serving.backends.base import Backend, HostOutputs
from maskrcnn_trt.serving.backends.loading import load_backend
from maskrcnn_trt.serving.engines.base import ModelInput
from maskrcnn_trt.serving.engines.bundle_engine import BundleLoader
from maskrcnn_trt.serving.engines.host_steps import plan_image, prepare_image
from maskrcnn_trt.serving.engines.worker_process import (
    WorkerProcess,
    assign_resources,
    start_workers,
)
from maskrcnn_trt.serving.errors import BackendError
from maskrcnn_trt.serving.pipeline import batching
from maskrcnn_trt.serving.pipeline.batching import Batcher
from maskrcnn_trt.serving.pipeline.scheduling import BatchPolicy
from maskrcnn_trt.serving.pipeline.shared_resources import DecodeMemory

Encode = Callable[..., bytes]
Loaded = WorkerProcess[ModelInput, HostOutputs]


@pytest.fixture(scope="module")
def backend(bundle: Path) -> Backend:
    return load_backend(bundle, read_manifest(bundle), "fp32")


@pytest.fixture(scope="module")
def model_input(bundle: Path, backend: Backend, picture: Encode) -> Callable[..., ModelInput]:
    preprocessing = read_manifest(bundle).preprocessing

    def prepare(seed: int = 0) -> ModelInput:
        return prepare_image(plan_image(picture(seed), preprocessing, backend.buckets))

    return prepare


def loaded(engine: Any, workers: int = 1) -> list[WorkerProcess[Any, Any]]:
    processes = start_workers(engine, assign_resources(workers), 60)
    for process in processes:
        process.load()
    return processes


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[Loaded]:
    description = BundleLoader(bundle, read_manifest(bundle), "fp32", "onnxruntime", 4)
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


async def test_images_of_one_bucket_share_batches(
    engine: Loaded, backend: Backend, model_input: Callable[..., ModelInput]
) -> None:
    images = [model_input(i) for i in range(10)]
    alone = [backend.infer(i.bucket, i.pixels[None], np.array([i.size])) for i in images]
    batcher = batcher_of(engine, 4, 0.05)
    async with running(batcher):
        results = await asyncio.gather(*map(batcher.infer, images))
    assert [r.batch_size for r in results] == [4] * 8 + [2] * 2
    for result, expected in zip(results, alone, strict=True):
        np.testing.assert_allclose(result.value.boxes, expected.boxes, rtol=0, atol=1e-2)


class Action(partial[Any]):
    bucket = actions.BUCKET


@pytest.mark.parametrize(("workers", "concurrency"), [(1, 2), (2, 1)])
async def test_batches_overlap_on_one_and_on_several_workers(
    tmp_path: Path, workers: int, concurrency: int
) -> None:
    engines = loaded(actions.ActionEngine(concurrency=concurrency), workers)
    a, b, c, d = (tmp_path / name for name in "abcd")
    meetings = [Action(actions.meet, *pair) for pair in ((a, b), (b, a), (c, d), (d, c))]
    batcher = Batcher(engines, BatchPolicy(1, 0))
    async with running(batcher):
        results = await asyncio.gather(*map(batcher.infer, meetings))
    batcher.close()
    assert len({result.value for result in results}) == workers


async def test_only_full_batches_start_on_a_busy_worker(tmp_path: Path) -> None:
    engines = loaded(actions.ActionEngine(concurrency=2, saturating_batches=1), 1)
    a, b = tmp_path / "a", tmp_path / "b"
    batcher = Batcher(engines, BatchPolicy(2, 0))
    async with running(batcher):
        first = asyncio.create_task(batcher.infer(Action(actions.meet, a, b)))
        while not a.exists():
            await asyncio.sleep(0.01)
        second = asyncio.create_task(batcher.infer(Action(os.getpid)))
        await asyncio.sleep(0.1)
        assert not second.done()
        results = await asyncio.gather(second, batcher.infer(Action(os.getpid)))
        assert [result.batch_size for result in results] == [2, 2]
        assert not first.done()
        b.touch()
        await first
    batcher.close()


async def test_a_single_image_starts_after_the_delay(
    engine: Loaded, model_input: Callable[..., ModelInput]
) -> None:
    batcher = batcher_of(engine, 4, 0.03)
    async with running(batcher):
        result = await batcher.infer(model_input())
    assert result.batch_size == 1
    assert result.queue_s >= 0.03


@pytest.mark.slow
async def test_a_restart_that_hangs_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batching, "START_TIMEOUT_S", 10.0)
    starts = tmp_path / "starts"
    (engine,) = loaded(actions.ActionEngine(partial(actions.hang_at_second, starts)))
    batcher = batcher_of(engine, 1)
    async with running(batcher), asyncio.timeout(300):
        engine.kill()
        while starts.stat().st_size < 2:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(batching, "START_TIMEOUT_S", 300.0)  # for the starts after the hang
        while batcher.restarts == 0:
            await asyncio.sleep(0.01)
        assert (await batcher.infer(Action(os.getpid))).value
    batcher.close()
    assert starts.stat().st_size >= 3
    assert "next attempt in 1 s: the model is not ready after" in caplog.text
    assert "Traceback" not in caplog.text


async def test_workers_whose_backends_take_other_items_are_rejected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = actions.ActionEngine()
    (engine,) = loaded(loader)
    batcher = batcher_of(engine, 1)
    loader.info = loader.info._replace(backend="another", is_end_to_end=True)
    (other,) = loaded(loader)
    message = "first worker uses none, and the two backends cannot compute"
    with pytest.raises(BackendError, match=f"{message}.*--backend"):
        Batcher([engine, other], BatchPolicy(1, 0))
    other.close()
    async with running(batcher), asyncio.timeout(60):
        engine.kill()
        while message not in caplog.text:  # the error of the restarted worker
            await asyncio.sleep(0.01)
        assert not batcher.is_up
    batcher.close()


async def test_cancelled_images_leave_the_queue(
    engine: Loaded, model_input: Callable[..., ModelInput]
) -> None:
    batcher = batcher_of(engine, 8)
    tasks = [asyncio.create_task(batcher.infer(model_input(i))) for i in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    tasks[2].cancel()
    await asyncio.wait([tasks[0], tasks[2]])
    async with running(batcher):
        assert (await tasks[1]).batch_size == 1


async def test_memory_stays_reserved_until_the_engine_has_decoded_the_image(tmp_path: Path) -> None:
    memory, started, end = DecodeMemory(400, threads=4), tmp_path / "started", tmp_path / "end"
    (engine,) = loaded(actions.ActionEngine())
    batcher = batcher_of(engine, 1)

    async def process() -> None:
        async with memory.reserve("a", 200) as reserved:
            await batcher.infer(Action(actions.meet, started, end), memory=reserved)

    async with running(batcher), asyncio.timeout(60):
        task = asyncio.create_task(process())
        while not started.exists():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert memory.reserved == 200
        end.touch()
        while memory.reserved:
            await asyncio.sleep(0.01)
        await process()
        await asyncio.sleep(0)
        assert memory.reserved == 0
    batcher.close()


async def test_a_failed_batch_fails_only_its_images(
    engine: Loaded, model_input: Callable[..., ModelInput]
) -> None:
    good = model_input()
    batcher = batcher_of(engine, 1)
    async with running(batcher):
        with pytest.raises(Exception, match="invalid dimensions"):
            await batcher.infer(good._replace(pixels=good.pixels[:, :-1]))
        assert (await batcher.infer(good)).value.num_detections[0] > 0
