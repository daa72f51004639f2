"""Measurement of inference engines, from a batch of images to its detections."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...model.bundle.manifest import QUANTIZED_PRECISIONS, Precision
from ...model.bundle.spec import ShapeBucket
from ...serving.config import BackendName
from ..common.gpu_time import StageTimes, measure_stages
from ..common.images import batch_from_encoded, noise_jpeg
from ..common.machine import MatmulRoofline, measure_matmul_rooflines
from ..common.processes import (
    MemoryKind,
    ProcessError,
    iterate_in_process,
    peak_memory_mib,
    reset_peak_memory,
)
from ..common.timing import Latency, latency_from_seconds, measure_call_rate, measure_durations
from .runners import (
    BatchRun,
    BundleRunner,
    DataPlace,
    EngineSpec,
    InferBaseline,
    TorchRunner,
    first_bucket,
)

# Minimum length of the warm-up as a fraction of `InferSettings.seconds`.
_WARMUP_SHARE = 0.2


class MeasurementError(Exception):
    """An engine could not be measured."""


@dataclass(frozen=True, kw_only=True)
class InferSettings:
    """Settings of the inference benchmark: engines, batch sizes, images and durations."""

    # Images per batch.
    batches: Sequence[int] = (1, 8)
    precisions: Sequence[Precision] = ("fp32",)
    # Backend of bundles.
    backend: BackendName = "auto"
    # Baselines to measure too: torchvision's model with the weights of each checkpoint, and ONNX
    # Runtime on each bundle.
    peers: Sequence[InferBaseline] = ()
    # Input size, to which each image is stretched. None: the first size of the first model.
    bucket: ShapeBucket | None = None
    # Encoded images to fill batches with. Empty: one image of noise.
    images: Sequence[bytes] = ()
    # Duration of each measurement. If an engine can queue batches on a GPU, half of it is for
    # latency, and half for throughput.
    seconds: float = 5.0
    # Whether to measure GPU time by stage, in the first precision, for bundles that the torch
    # backend runs on a GPU.
    with_stages: bool = False
    # Minimum number of batches that run before each measurement.
    warmup: int = 3


@dataclass(frozen=True)
class InferResult:
    """Throughput, latency and memory of one engine at one batch size."""

    # Path of the bundle or checkpoint.
    model: str
    engine: str
    precision: Precision
    device: Literal["cpu", "cuda"]
    data: DataPlace
    # Input size in pixels, as HEIGHTxWIDTH.
    bucket: str
    batch: int
    # Number of batches whose latency was measured. If the engine can queue batches, its throughput
    # was measured with as many further batches.
    iterations: int
    # Throughput with batches queued back to back if the engine supports it, else one by one.
    images_per_second: float
    # Latency of a batch. Each batch starts when the previous one is complete.
    latency: Latency
    # Peak memory at this batch size. It includes memory kept from smaller batches.
    peak_memory_mib: float
    # Kind of memory whose peak is `peak_memory_mib`.
    memory: MemoryKind
    # Mean over the images of the batch.
    detections_per_image: float


@dataclass(frozen=True)
class InferFailure:
    """Engine that could not be measured, and the reason."""

    model: str
    engine: str
    precision: Precision
    # Batch size at which the engine failed. None: it failed before any batch was measured.
    batch: int | None
    reason: str


Measurement = InferResult | InferFailure | StageTimes


def measure_models(
    models: Sequence[Path],
    settings: InferSettings,
    on_measurement: Callable[[Measurement], object] | None = None,
) -> list[InferResult]:
    """Measure bundles, checkpoints and the baselines that the settings name.

    Each model and each baseline runs in a new process per precision.

    Args:
        models: Bundles and checkpoints.
        settings: Engines, batch sizes, images and durations.
        on_measurement: Function that is called with each result, failure and GPU profile as soon
            as it is measured. None: the first failure raises an error.

    Returns:
        The results, without failures and GPU profiles.

    Raises:
        BundleError, CheckpointError: `settings` has no input size, and the first model cannot
            be read.
        MeasurementError: `on_measurement` is None, and an engine failed or its model cannot be
            read.
    """
    bucket = settings.bucket or first_bucket(models[0])
    results: list[InferResult] = []
    for spec in engine_specs(models, settings):
        wanted = (str(spec.model), spec.name, spec.precision)
        if any((r.model, r.engine, r.precision) == wanted for r in results):
            continue  # the backend `auto` selected this baseline, so it is measured already
        for measurement in _measure_in_process(spec, bucket, settings):
            if on_measurement is not None:
                on_measurement(measurement)
            elif isinstance(measurement, InferFailure):
                raise MeasurementError(measurement.reason)
            if isinstance(measurement, InferResult):
                results.append(measurement)
    return results


def measure_rooflines(models: Sequence[Path], settings: InferSettings) -> list[MatmulRoofline]:
    """Return upper bounds of the throughput of the first checkpoint in `models`, by precision.

    int8 and fp8 have no bound, because the rate of matrix products is not measured in them. If
    there is no checkpoint or no GPU, return [].

    Args:
        models: Checkpoints (files) and bundles (folders).
        settings: Precisions and input size. If the input size is None, the first input size of
            the first model is used.

    Raises:
        CheckpointError: the first file in `models` is not a checkpoint.
        BundleError: the input size is None, and the first model is a bundle that cannot be read.
        ProcessError: the measuring process died.
    """
    checkpoint = next((model for model in models if model.is_file()), None)
    if checkpoint is None:
        return []
    from ...model.weights.references import checkpoint_from_reference

    bucket = settings.bucket or first_bucket(models[0])
    config = checkpoint_from_reference(checkpoint).model_config
    floats = [p for p in settings.precisions if p not in QUANTIZED_PRECISIONS]
    return list(iterate_in_process(measure_matmul_rooflines, floats, config, bucket))


def engine_specs(models: Sequence[Path], settings: InferSettings) -> Iterator[EngineSpec]:
    """Yield the engines to measure. In each precision, baselines come after the models."""
    with_torchvision = "torchvision" in settings.peers
    with_onnxruntime = "onnxruntime" in settings.peers and settings.backend != "onnxruntime"
    for precision in settings.precisions:
        for model in models:
            yield EngineSpec(model, precision, settings.backend)
        for model in models:
            if with_torchvision and model.is_file():
                yield EngineSpec(model, precision, with_torchvision=True)
            if with_onnxruntime and model.is_dir():
                yield EngineSpec(model, precision, "onnxruntime")


def _failure(spec: EngineSpec, batch: int | None, reason: str) -> InferFailure:
    return InferFailure(str(spec.model), spec.name, spec.precision, batch, reason)


def _measure_in_process(
    spec: EngineSpec, bucket: ShapeBucket, settings: InferSettings
) -> Iterator[Measurement]:
    if spec.backend == "onnxruntime" and spec.precision == "bf16":
        yield _failure(
            spec, None, "there is no ONNX model in bf16; measure bf16 with --backend torch"
        )
        return
    try:
        yield from iterate_in_process(_measure_engine, spec, bucket, settings)
    except ProcessError as error:
        yield _failure(spec, None, str(error))


def _measure_engine(
    spec: EngineSpec, bucket: ShapeBucket, settings: InferSettings
) -> Iterator[Measurement]:
    """Measure an engine at each batch size in ascending order.

    If a batch size fails, an `InferFailure` is yielded, and the next batch size is measured. If the
    engine cannot be loaded, a single `InferFailure` is yielded.
    """
    try:
        runner = spec.load(bucket, max(settings.batches))
        encoded = settings.images or [noise_jpeg(bucket)]
        images = batch_from_encoded(encoded, bucket, max(settings.batches))
    except Exception as error:
        yield _failure(spec, None, _reason_from(error))
        return
    batches = [images[:batch] for batch in sorted(settings.batches)]

    def speed(run: BatchRun, batch: int) -> InferResult:
        return _measure_speed(spec, run, bucket, batch, settings)

    def stages(run: BatchRun, batch: int) -> StageTimes | None:
        is_profiled = (run.engine, run.device, run.data) == ("torch", "cuda", "device")
        if not is_profiled:
            return None
        return measure_stages(run.run, run.engine, spec.precision, batch)

    yield from _measure_batches(spec, runner, batches, speed)
    if settings.with_stages and spec.precision == settings.precisions[0]:
        # Profile after all measurements of speed, because the profiler may slow them down.
        yield from _measure_batches(spec, runner, batches, stages)


def _measure_batches(
    spec: EngineSpec,
    runner: BundleRunner | TorchRunner,
    batches: list[NDArray[np.uint8]],
    measure: Callable[[BatchRun, int], Measurement | None],
) -> Iterator[Measurement]:
    for images in batches:
        reset_peak_memory()
        try:
            for run in runner.batch_runs(images):
                measurement = measure(run, len(images))
                if measurement is not None:
                    yield measurement
        except Exception as error:  # each library has its own exception type for lack of memory
            yield _failure(spec, len(images), _reason_from(error))


def _measure_speed(
    spec: EngineSpec, run: BatchRun, bucket: ShapeBucket, batch: int, settings: InferSettings
) -> InferResult:
    measure_durations(run.run, _WARMUP_SHARE * settings.seconds, settings.warmup)
    detections = sum(run.count_detections(run.run()))
    if run.synchronize is None:
        durations = measure_durations(run.run, settings.seconds)
        rate = len(durations) / sum(durations)
    else:
        durations = measure_durations(run.run, settings.seconds / 2)
        rate = measure_call_rate(run.enqueue, run.synchronize, len(durations))
    return InferResult(
        model=str(spec.model),
        engine=run.engine,
        precision=spec.precision,
        device=run.device,
        data=run.data,
        bucket=str(bucket),
        batch=batch,
        iterations=len(durations),
        images_per_second=batch * rate,
        latency=latency_from_seconds(durations),
        peak_memory_mib=peak_memory_mib(run.memory),
        memory=run.memory,
        detections_per_image=float(detections / batch),
    )


def _reason_from(error: Exception) -> str:
    """Return an error's message.

    If the error's type is not from this package, return the type and the message's first line.
    """
    own, _, _ = __name__.partition(".")
    if type(error).__module__.startswith(f"{own}."):
        return str(error)
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
