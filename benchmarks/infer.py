"""Inference speed: from a batch of images to its detections."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..model.manifest import Precision
from ..model.spec import ShapeBucket
from ..serving.config import BackendName
from .engines import DataPlace, EngineChoice, first_bucket
from .latency import Latency
from .memory import MemoryKind
from .processes import ProcessError, answers_from_process
from .stages import StageTimes

if TYPE_CHECKING:
    from .matmul_floor import MatmulFloor

Peer = Literal["torchvision", "onnxruntime"]


class MeasurementError(Exception):
    """An engine could not be measured."""


@dataclass(frozen=True, kw_only=True)
class InferSettings:
    """How engines are measured."""

    batches: Sequence[int] = (1, 8)
    """Images a batch."""
    precisions: Sequence[Precision] = ("fp32",)
    backend: BackendName = "auto"
    """What computes bundles."""
    peers: Sequence[Peer] = ()
    """Measured too: torchvision's model with the weights of each checkpoint, and ONNX Runtime with
    each bundle."""
    bucket: ShapeBucket | None = None
    """Input size, over which each image is stretched; none, the first of the first model."""
    images: Sequence[bytes] = ()
    """Encoded images that batches are filled with; none, noise."""
    seconds: float = 5.0
    """Length of each measurement, half for latency, half for throughput."""
    with_stages: bool = False
    """Also take the time by stage of bundles in the first precision, where torch computes them on
    a GPU."""
    warmup: int = 3
    """Batches at least that are run before each measurement, for a fifth of its length or more."""


@dataclass(frozen=True)
class InferResult:
    """One engine at one batch size."""

    model: str
    """Path of the bundle or checkpoint."""
    engine: str
    precision: Precision
    device: Literal["cpu", "cuda"]
    data: DataPlace
    """Where the images lie and the detections end up."""
    bucket: str
    """Input pixels, height x width."""
    batch: int
    iterations: int
    """Batches whose latency was measured, and as many again for the throughput."""
    images_per_second: float
    """Of batches that are queued back to back, where the engine lets them be queued."""
    latency: Latency
    """Of a batch that is begun when the last is complete."""
    peak_memory_mib: float
    """Of this batch size and the smaller ones before it, as `memory.peak_memory_mib` defines it."""
    memory: MemoryKind
    """What that counts."""
    detections_per_image: float
    """Mean of the batch."""


@dataclass(frozen=True)
class InferFailure:
    """What could not be measured."""

    model: str
    engine: str
    precision: Precision
    batch: int | None
    """None where no batch could be."""
    reason: str


Answer = InferResult | InferFailure | StageTimes


def measure_models(
    models: Sequence[Path],
    settings: InferSettings,
    on_answer: Callable[[Answer], object] | None = None,
) -> list[InferResult]:
    """Measure bundles and checkpoints in every precision, and their peers.

    Each engine has a process of its own in each precision, so that none inherits memory or settings
    of another.

    Args:
        models: What export or training wrote.
        settings: How.
        on_answer: Called with all that comes, when it comes. Without it a failure is raised, with
            it the rest goes on.

    Raises:
        BundleError: the first model is a bundle that cannot be read.
        CheckpointError: the first model is no checkpoint.
        MeasurementError: something cannot be measured, and there is no `on_answer`.
    """
    bucket = settings.bucket or first_bucket(models[0])
    results: list[InferResult] = []
    for choice in engine_choices(models, settings):
        if _is_measured(choice, results):
            continue
        for answer in _answers(choice, bucket, settings):
            if on_answer is not None:
                on_answer(answer)
            elif isinstance(answer, InferFailure):
                raise MeasurementError(answer.reason)
            if isinstance(answer, InferResult):
                results.append(answer)
    return results


def measure_floors(models: Sequence[Path], settings: InferSettings) -> list["MatmulFloor"]:
    """What the GPU would reach in each precision if only the multiplications took time.

    They are counted in the first checkpoint of the models; without one nothing is measured.

    Raises:
        CheckpointError: the file is no checkpoint.
        ProcessError: the process died.
    """
    checkpoint = next((model for model in models if model.is_file()), None)
    if checkpoint is None:
        return []
    from ..model.checkpoint import load_checkpoint
    from .matmul_floor import floors_of

    bucket = settings.bucket or first_bucket(models[0])
    config = load_checkpoint(checkpoint).model_config
    return list(answers_from_process(floors_of, settings.precisions, config, bucket))


def engine_choices(models: Sequence[Path], settings: InferSettings) -> Iterator[EngineChoice]:
    """All that is to be measured: a precision after the other, in each the peers last."""
    with_torchvision = "torchvision" in settings.peers
    with_onnxruntime = "onnxruntime" in settings.peers and settings.backend != "onnxruntime"
    for precision in settings.precisions:
        for model in models:
            yield EngineChoice(model, precision, settings.backend)
        for model in models:
            if with_torchvision and model.is_file():
                yield EngineChoice(model, precision, with_torchvision=True)
            if with_onnxruntime and model.is_dir():
                yield EngineChoice(model, precision, "onnxruntime")


def failure_of(choice: EngineChoice, batch: int | None, reason: str) -> InferFailure:
    """That an engine could not be measured at a batch size, or at none."""
    return InferFailure(str(choice.model), choice.name, choice.precision, batch, reason)


def _is_measured(choice: EngineChoice, results: Sequence[InferResult]) -> bool:
    """Whether this peer is what the backend of the bundle turned out to be."""
    wanted = (str(choice.model), choice.name, choice.precision)
    return any((r.model, r.engine, r.precision) == wanted for r in results)


def _answers(
    choice: EngineChoice, bucket: ShapeBucket, settings: InferSettings
) -> Iterator[Answer]:
    from .infer_process import measure_engine

    if choice.backend == "onnxruntime" and choice.precision == "bf16":
        yield failure_of(choice, None, "there is no ONNX model in bf16, which only torch computes")
        return
    try:
        yield from answers_from_process(measure_engine, choice, bucket, settings)
    except ProcessError as error:
        yield failure_of(choice, None, str(error))
