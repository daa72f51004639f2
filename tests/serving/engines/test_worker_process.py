import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import faulty_engines as actions
import numpy as np
import pytest
from faulty_engines import ActionEngine
from open_files import no_free_files
from server_load import wait_until

from maskrcnn_trt.model.bundle.manifest import BundleError, read_manifest
from maskrcnn_trt.model.image_limits import ImageError
from maskrcnn_trt.serving.backends.loading import load_backend
from maskrcnn_trt.serving.engines.bundle_engine import BundleLoader
from maskrcnn_trt.serving.engines.host_steps import plan_image, prepare_image
from maskrcnn_trt.serving.engines.worker_process import (
    WorkerProcess,
    WorkerResources,
    assign_resources,
    start_workers,
)
from maskrcnn_trt.serving.errors import BackendDownError, BackendError

Encode = Callable[..., bytes]
Process = WorkerProcess[Any, Any]

ALL_CORES = frozenset(os.sched_getaffinity(0))


def start(engine: Any, cores: frozenset[int] = ALL_CORES, hang_timeout_s: float = 60) -> Process:
    return WorkerProcess(engine, WorkerResources({"WORKER_TEST": "set"}, cores), hang_timeout_s)


@pytest.fixture(scope="module")
def worker() -> Iterator[Process]:
    process = start(ActionEngine())
    process.load()
    yield process
    process.close()
    assert process.exited.result().endswith("ended: exit status 0")


def test_outputs_equal_those_of_the_backend(wide_bundle: Path, picture: Encode) -> None:
    manifest = read_manifest(wide_bundle)
    backend = load_backend(wide_bundle, manifest, "fp32")
    images = [
        prepare_image(plan_image(picture(i), manifest.preprocessing, backend.buckets))
        for i in range(3)
    ]
    expected = backend.infer(
        images[0].bucket,
        np.stack([image.pixels for image in images]),
        np.array([image.size for image in images]),
    )
    loader = BundleLoader(wide_bundle, manifest, "fp32", "onnxruntime", 4)
    (process,) = start_workers(loader, assign_resources(1), 60)
    process.load()
    process.warm_up(4)
    results = process.compute(images)
    process.compute(images[:1])  # reuses the memory of the previous results
    process.close()
    assert process.info.buckets == backend.buckets
    for row, result in enumerate(results):
        for own, whole in zip(result, expected, strict=True):
            np.testing.assert_allclose(own, whole[row : row + 1], rtol=0, atol=1e-4)


def test_cores_environment_and_garbage_collections() -> None:
    core = min(ALL_CORES)
    process = start(ActionEngine(), frozenset({core}))
    process.load()
    requests = [
        actions.thread_cores,
        partial(os.getenv, "WORKER_TEST"),
        actions.tracked_objects,
    ]
    cores, variable, cold = process.compute(requests)
    process.warm_up(1)
    (warm,) = process.compute([actions.tracked_objects])
    process.close()
    assert cores == {core}
    assert variable == "set"
    assert warm < cold / 10  # collections skip the objects of a warm engine


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ImageError("damaged"), ImageError, "^damaged$"),
        (BundleError("damaged"), BundleError, "^damaged$"),
        (BackendError("does not compute"), BackendError, "^does not compute$"),
        (ZeroDivisionError("no"), BackendError, "ZeroDivisionError: no$"),
        (SystemExit(1), BackendError, "SystemExit: 1$"),
    ],
)
def test_errors_fail_their_batch_only(
    worker: Process, error: BaseException, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        worker.compute([partial(actions.raise_error, error)])
    assert type(caught.value) is kind
    assert worker.compute([partial(abs, -1)]) == [1]


def test_log_records_reach_the_server(worker: Process, caplog: pytest.LogCaptureFixture) -> None:
    worker.compute([actions.log_twice])
    with pytest.raises(BackendError):
        worker.compute([partial(actions.raise_error, ValueError("odd"))])
    wait_until(lambda: "ValueError: odd" in caplog.text)
    records = [(record.name, record.getMessage()) for record in caplog.records]
    assert ("maskrcnn_trt.serving.trial", "loud enough") in records
    assert "too quiet" not in caplog.text


def test_stop_signals_do_not_end_a_worker(worker: Process) -> None:
    (pid,) = worker.compute([os.getpid])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    assert worker.compute([os.getpid]) == [pid]


@pytest.mark.parametrize(
    ("load", "kind", "words"),
    [
        (partial(actions.raise_error, BundleError("no model")), BundleError, "^no model$"),
        (partial(actions.raise_error, OSError("no disk")), BackendError, "OSError: no disk"),
        (partial(os._exit, 3), BackendError, r"process \d+ ended: exit status 3; .* log"),
    ],
)
def test_load_failures_name_the_reason(load: Any, kind: type[Exception], words: str) -> None:
    process = start(ActionEngine(load))
    with pytest.raises(kind, match=words):
        process.load()
    process.exited.result()


def test_a_process_that_ends_during_its_warm_up_is_named() -> None:
    process = start(ActionEngine(on_warm_up=partial(os._exit, 3)))
    process.load()
    with pytest.raises(BackendError, match=r"loading .* process \d+ ended: exit status 3; .* log"):
        process.warm_up(1)


def test_loading_without_a_free_file_descriptor_fails_at_once() -> None:
    process = start(ActionEngine())
    assert process._control.poll(60)
    with no_free_files(), pytest.raises(BackendError, match=r"Too many open files; .*ulimit -n"):
        process.load()
    process.kill()


def test_a_process_that_ends_or_hangs_can_be_replaced() -> None:
    process = start(ActionEngine(), hang_timeout_s=1)
    process.load()
    for action in (actions.kill_itself, actions.hang):
        with pytest.raises(BackendDownError, match=r"worker process .* ended"):
            process.compute([action])
        assert process.exited.result().endswith("ended: Killed")
        with pytest.raises(BackendDownError):
            process.compute([os.getpid])
        process.close()
        process = process.successor()
        process.load()
        assert process.compute([partial(abs, -1)]) == [1]
    process.close()
