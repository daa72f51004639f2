"""Inference speed: from a batch of images to its detections."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..model.manifest import Precision
from ..model.spec import ShapeBucket
from ..serving.config import BackendName
from .engines import Engine, engines_from_path, first_bucket
from .images import batch_from_encoded, noise_jpeg
from .latency import Latency, latency_from_seconds
from .memory import peak_memory_mib, reset_peak_memory


@dataclass(frozen=True, kw_only=True)
class InferSettings:
    """How engines are measured."""

    batches: Sequence[int] = (1, 8)
    """Images a batch."""
    precision: Precision = "fp32"
    backend: BackendName = "auto"
    """What computes bundles."""
    bucket: ShapeBucket | None = None
    """Input size, over which each image is stretched; none, the first of the first model."""
    images: Sequence[bytes] = ()
    """Encoded images that batches are filled with; none, noise."""
    seconds: float = 5.0
    """Length of each measurement; one batch at least is measured."""
    warmup: int = 3
    """Batches run before each measurement."""
    with_torchvision: bool = False
    """Measure torchvision's model too, with the weights of each checkpoint."""


@dataclass(frozen=True)
class InferResult:
    """One engine at one batch size."""

    engine: str
    precision: str
    device: str
    bucket: str
    """Input pixels, height x width."""
    batch: int
    iterations: int
    images_per_second: float
    latency: Latency
    """Of a batch."""
    peak_memory_mib: float
    """As `memory.peak_memory_mib` defines it."""


def measure_models(models: Sequence[Path], settings: InferSettings) -> list[InferResult]:
    """Measure bundles and checkpoints, batch after batch, each when the last is done.

    Raises:
        BundleError: a bundle cannot be read or lacks the precision or input size.
        BackendError: the backend does not run here, or not with such batches.
        CheckpointError: a file is no checkpoint.
        ImageError: an image is none.
    """
    bucket = settings.bucket or first_bucket(models[0])
    results: list[InferResult] = []
    for model in models:
        for engine in engines_from_path(
            model,
            settings.precision,
            bucket,
            backend=settings.backend,
            max_batch=max(settings.batches),
            with_torchvision=settings.with_torchvision,
        ):
            results += [_measure(engine, batch, bucket, settings) for batch in settings.batches]
            engine.close()
    return results


def _measure(
    engine: Engine, batch: int, bucket: ShapeBucket, settings: InferSettings
) -> InferResult:
    images = settings.images or [noise_jpeg(bucket)]
    reset_peak_memory()
    run = engine.bind(batch_from_encoded(images, bucket, batch))
    for _ in range(settings.warmup):
        run()
    durations = _durations_of(run, settings.seconds)
    return InferResult(
        engine=engine.name,
        precision=engine.precision,
        device=engine.device,
        bucket=str(bucket),
        batch=batch,
        iterations=len(durations),
        images_per_second=batch * len(durations) / sum(durations),
        latency=latency_from_seconds(durations),
        peak_memory_mib=peak_memory_mib(engine.device),
    )


def _durations_of(run: Callable[[], None], seconds: float) -> list[float]:
    """Seconds of each call, one after the other, until their time is up."""
    durations: list[float] = []
    before = time.perf_counter()
    end = before + seconds
    while not durations or before < end:
        run()
        after = time.perf_counter()
        durations.append(after - before)
        before = after
    return durations
