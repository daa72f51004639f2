import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import faulty_engines as deeds
import numpy as np
import pytest
from faulty_engines import ObedientEngine
from server_load import wait_until

from maskrcnn_trt.model.images import ImageError
from maskrcnn_trt.model.manifest import BundleError, read_manifest
from maskrcnn_trt.serving.backends.loading import load_backend
from maskrcnn_trt.serving.engines.bundle_engine import BundleEngine
from maskrcnn_trt.serving.engines.engine_process import EngineProcess, start_engines
from maskrcnn_trt.serving.engines.placement import Place, places_for
from maskrcnn_trt.serving.errors import BackendDownError, BackendError
from maskrcnn_trt.serving.steps.preprocessing import prepare_image

Encode = Callable[..., bytes]
Process = EngineProcess[Any, Any]

ALL_CORES = frozenset(os.sched_getaffinity(0))


def process_of(
    engine: Any, cores: frozenset[int] = ALL_CORES, hang_timeout_s: float = 60
) -> Process:
    return EngineProcess(engine, Place({"PLACE": "here"}, cores), hang_timeout_s)


@pytest.fixture(scope="module")
def obedient() -> Iterator[Process]:
    process = process_of(ObedientEngine())
    process.load()
    yield process
    process.close()
    assert process.exited.result().endswith("ended: exit status 0")


def test_outputs_are_those_of_the_backend(bundle: Path, picture: Encode) -> None:
    manifest = read_manifest(bundle)
    backend = load_backend(bundle, manifest, "fp32")
    images = [
        prepare_image(picture(i), manifest.preprocessing, backend.buckets, 10**6) for i in range(3)
    ]
    expected = backend.infer(
        images[0].bucket,
        np.stack([image.pixels for image in images]),
        np.array([image.size for image in images]),
    )
    engine = BundleEngine(bundle, manifest, "fp32", "onnxruntime", 4)
    (process,) = start_engines(engine, places_for(1), 60)
    process.load()
    process.warm_up(4)
    results = process.compute(images)
    process.compute(images[:1])  # in memory where the results of the last batch were
    process.close()
    assert process.info.buckets == backend.buckets
    for row, result in enumerate(results):
        for own, whole in zip(result, expected, strict=True):
            np.testing.assert_allclose(own, whole[row : row + 1], rtol=0, atol=1e-4)


def test_collections_of_garbage_pass_over_a_warm_engine() -> None:
    process = process_of(ObedientEngine())
    process.load()
    cold = process.compute([deeds.objects_looked_at])[0]
    process.warm_up(1)
    assert process.compute([deeds.objects_looked_at])[0] < cold / 10
    process.close()


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ImageError("damaged"), ImageError, "^damaged$"),
        (BundleError("damaged"), BundleError, "^damaged$"),
        (BackendError("does not compute"), BackendError, "^does not compute$"),
        (ZeroDivisionError("no"), BackendError, "^a batch failed with ZeroDivisionError: no$"),
        (SystemExit(1), BackendError, "^a batch failed with SystemExit: 1$"),
    ],
)
def test_errors_fail_their_batch_only(
    obedient: Process, error: BaseException, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        obedient.compute([partial(deeds.raise_error, error)])
    assert type(caught.value) is kind
    assert obedient.compute([partial(abs, -1)]) == [1]


def test_its_log_is_the_servers(obedient: Process, caplog: pytest.LogCaptureFixture) -> None:
    obedient.compute([deeds.log_twice])
    with pytest.raises(BackendError):
        obedient.compute([partial(deeds.raise_error, ValueError("odd"))])
    wait_until(lambda: "ValueError: odd" in caplog.text)
    records = [(record.name, record.getMessage()) for record in caplog.records]
    assert ("maskrcnn_trt.serving.trial", "loud enough") in records
    assert "too quiet" not in caplog.text


def test_it_is_where_it_was_placed() -> None:
    core = min(ALL_CORES)
    process = process_of(ObedientEngine(), frozenset({core}))
    process.load()
    cores, place = process.compute([deeds.thread_cores, partial(os.getenv, "PLACE")])
    process.close()
    assert cores == {core}
    assert place == "here"


def test_signals_for_the_server_do_not_end_it(obedient: Process) -> None:
    (pid,) = obedient.compute([os.getpid])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    assert obedient.compute([os.getpid]) == [pid]


@pytest.mark.parametrize(
    ("load", "kind", "words"),
    [
        (partial(deeds.raise_error, BundleError("no model")), BundleError, "^no model$"),
        (
            partial(deeds.raise_error, OSError("no disk")),
            BackendError,
            "the engine could not be loaded with OSError: no disk",
        ),
        (deeds.kill_itself, BackendError, "not loaded, for process .* ended: Killed;"),
        (partial(os._exit, 3), BackendError, "ended: exit status 3; the log may say why"),
    ],
)
def test_what_does_not_load_says_why(load: Any, kind: type[Exception], words: str) -> None:
    process = process_of(ObedientEngine(load))
    with pytest.raises(kind, match=words):
        process.load()
    process.exited.result()


@pytest.mark.parametrize("deed", [deeds.kill_itself, deeds.hang])
def test_a_process_that_ends_or_hangs_has_a_successor(deed: Any) -> None:
    process = process_of(ObedientEngine(), hang_timeout_s=1)
    process.load()
    with pytest.raises(BackendDownError, match="process that computed the batch ended"):
        process.compute([deed])
    assert process.exited.result().endswith("ended: Killed")
    with pytest.raises(BackendDownError):
        process.compute([os.getpid])
    process.close()
    successor = process.successor()
    successor.load()
    assert successor.compute([partial(abs, -1)]) == [1]
    successor.close()
