"""Server with several precisions of one bundle."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc
import numpy as np
import pytest
from click.testing import CliRunner
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from numpy.typing import NDArray
from scraped_metrics import Metrics, metrics_from_log
from server_load import server_process, wait_until, worker_pids
from shared_exports import cached_exports
from triton_requests import MODEL, images_of
from tritonclient.grpc import InferenceServerClient, InferResult
from tritonclient.grpc import aio as triton_aio

from maskrcnn_trt.export.commands import export
from maskrcnn_trt.model.bundle.manifest import Precision
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.offline import Detector

Encode = Callable[..., bytes]

PRECISIONS: Final[tuple[Precision, ...]] = ("fp16", "fp32", "tf32")
PICTURES: Final = 4

# Tolerance of scores in one precision, in any batch.
SAME = 3e-6
# Some score of an image differs by more than this between fp16 and fp32.
DIFFERENT = 1e-5

Scores = dict[Precision, list[NDArray[np.float32]]]


class Server(NamedTuple):
    pid: int
    address: str
    metrics: Metrics


@pytest.fixture(scope="module")
def precise_bundle(
    tiny_checkpoint: Path, shared_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Bundle of the tiny model in three precisions; fp32 and TF32 share one graph."""
    path = tmp_path_factory.mktemp("bundles") / "precise"
    words = [str(tiny_checkpoint), "-o", str(path), "--precision", "fp32", "tf32", "fp16"]
    with cached_exports(shared_folder):
        result = CliRunner().invoke(export, [*words, "--shape", "96x160"])
    assert result.exit_code == 0, result.output
    assert len(list(path.glob("*.onnx"))) == 2
    return path


@pytest.fixture(scope="module")
def server(precise_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Server on ONNX Runtime with default precision fp16."""
    log = tmp_path_factory.mktemp("logs") / "log"
    options = [word for precision in PRECISIONS for word in ("--precision", precision)]
    options += ["--backend", "onnxruntime", "--metrics-port", "0", "--max-wait-s", "60"]
    with server_process(precise_bundle, log, *options) as (process, address):
        yield Server(process.pid, address, metrics_from_log(log.read_text()))


@pytest.fixture(scope="module")
def expected(precise_bundle: Path, picture: Encode) -> Scores:
    """Scores of each image by precision, computed without a server."""
    scores: Scores = {}
    for precision in PRECISIONS:
        with contextlib.closing(Detector(precise_bundle, precision, "onnxruntime")) as predictor:
            found = [predictor.detect(picture(seed)) for seed in range(PICTURES)]
        scores[precision] = [detections.scores for detections in found]
    return scores


def scores_of(result: InferResult, row: int = 0) -> NDArray[np.float32]:
    scores: NDArray[np.float32] = result.as_numpy("scores")[row]
    return scores[: result.as_numpy("num_detections")[row, 0]]


def assert_same(scores: Any, expected: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(scores, expected, rtol=0, atol=SAME)


def test_on_a_cpu_only_half_precision_differs(expected: Scores) -> None:
    for half, full, same in zip(*(expected[p] for p in PRECISIONS), strict=True):
        assert DIFFERENT < np.abs(half - full).max() < 1e-3
        assert_same(same, full)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precision_by_model_name_and_by_parameter(
    server: Server, expected: Scores, picture: Encode, precision: Precision
) -> None:
    with (
        InferenceServerClient(server.address) as triton,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub: Any = DetectorStub(channel)
        images = images_of(*map(picture, range(4)))
        by_name = triton.infer(f"{MODEL}-{precision}", images)
        by_parameter = triton.infer(MODEL, images, parameters={"precision": precision})
        for seed in range(4):
            response = stub.Detect(pb.DetectRequest(image=picture(seed), precision=precision))
            own = [detection.score for detection in response.detections]
            for scores in (scores_of(by_name, seed), scores_of(by_parameter, seed), own):
                assert_same(scores, expected[precision][seed])


def test_the_first_precision_is_the_default(
    server: Server, expected: Scores, picture: Encode
) -> None:
    with (
        InferenceServerClient(server.address) as triton,
        grpc.insecure_channel(server.address) as channel,
    ):
        stub: Any = DetectorStub(channel)
        assert tuple(stub.GetModel(pb.GetModelRequest()).precisions) == PRECISIONS
        own = [d.score for d in stub.Detect(pb.DetectRequest(image=picture())).detections]
        for scores in (scores_of(triton.infer(MODEL, images_of(picture()))), own):
            assert_same(scores, expected["fp16"][0])
        assert [model.name for model in triton.get_model_repository_index().models] == [
            MODEL,
            *(f"{MODEL}-{precision}" for precision in PRECISIONS),
        ]


async def test_concurrent_requests_of_all_precisions(
    server: Server, expected: Scores, picture: Encode
) -> None:
    requests = [(p, seed) for _ in range(2) for seed in range(PICTURES) for p in PRECISIONS]

    async def computed() -> list[float]:
        name = "maskrcnn_request_seconds_count"
        values = (server.metrics.value(name, model=MODEL, precision=p) for p in PRECISIONS)
        return [await value for value in values]

    async with triton_aio.InferenceServerClient(server.address) as triton:
        for precision in PRECISIONS:  # creates the counters
            await triton.infer(f"{MODEL}-{precision}", images_of(picture()))
        before = await computed()
        calls = (triton.infer(f"{MODEL}-{p}", images_of(picture(s))) for p, s in requests)
        results = await asyncio.gather(*calls)
        after = await computed()
    for (precision, seed), result in zip(requests, results, strict=True):
        assert_same(scores_of(result), expected[precision][seed])
    assert [now - earlier for now, earlier in zip(after, before, strict=True)] == [
        2 * PICTURES
    ] * len(PRECISIONS)


def test_each_precision_has_its_own_readiness(server: Server) -> None:
    with (
        InferenceServerClient(server.address) as triton,
        grpc.insecure_channel(server.address) as channel,
    ):
        names = MODEL, *(f"{MODEL}-{precision}" for precision in PRECISIONS)
        by_health: set[tuple[bool, ...]] = set()
        by_triton: set[tuple[bool, ...]] = set()

        def all_ready() -> bool:
            health, serving = HealthStub(channel), HealthCheckResponse.SERVING
            answers = [health.Check(HealthCheckRequest(service=n), timeout=60) for n in names]
            states = [
                tuple(a.status == serving for a in answers),
                tuple(map(triton.is_model_ready, names)),
            ]
            by_health.add(states[0])
            by_triton.add(states[1])
            return all(map(all, states))

        assert all_ready()
        for pid in worker_pids(server.pid):
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not all_ready())
            wait_until(all_ready)
    # The default precision shares its readiness with the bare name.
    for states in (by_health, by_triton):
        assert {(False, False, True, True), (True, True, False, True)} < states
        assert (True, True, True, False) in states
