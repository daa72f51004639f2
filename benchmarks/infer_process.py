"""An engine that is measured, in a process that it has for itself."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..model.spec import ShapeBucket
from .engines import EngineChoice, Run
from .images import batch_from_encoded, noise_jpeg
from .infer import InferFailure, InferResult, InferSettings, failure_of
from .latency import latency_from_seconds
from .memory import peak_memory_mib, reset_peak_memory
from .stages import StageTimes, measure_stages
from .timing import calls_per_second, durations_of

_WARMUP_SHARE = 0.1


def measure_engine(
    choice: EngineChoice, bucket: ShapeBucket, settings: InferSettings
) -> Iterator[InferResult | InferFailure]:
    """Measure one batch size after the other, the smallest first; what fails is an answer too."""
    try:
        engine = choice.load(bucket, max(settings.batches))
        images = _largest_batch(bucket, settings)
    except Exception as error:
        yield failure_of(choice, None, _reason_from(error))
        return
    for batch in sorted(settings.batches):
        reset_peak_memory()
        try:
            for run in engine.runs_over(images[:batch]):
                yield _measure(choice, run, bucket, batch, settings)
        except Exception as error:  # of any library: that memory is short has many names
            yield failure_of(choice, batch, _reason_from(error))


def profile_engine(
    choice: EngineChoice, bucket: ShapeBucket, settings: InferSettings
) -> Iterator[StageTimes]:
    """Time by stage at every batch size, of what torch computes on a GPU from images there."""
    engine = choice.load(bucket, max(settings.batches))
    images = _largest_batch(bucket, settings)
    for batch in sorted(settings.batches):
        for run in engine.runs_over(images[:batch]):
            if (run.engine, run.device, run.data) == ("torch", "cuda", "device"):
                yield measure_stages(run, choice.precision, batch)


def _largest_batch(bucket: ShapeBucket, settings: InferSettings) -> NDArray[np.uint8]:
    encoded = settings.images or [noise_jpeg(bucket)]
    return batch_from_encoded(encoded, bucket, max(settings.batches))


def _measure(
    choice: EngineChoice, run: Run, bucket: ShapeBucket, batch: int, settings: InferSettings
) -> InferResult:
    durations_of(run.complete, _WARMUP_SHARE * settings.seconds, settings.warmup)
    durations = durations_of(run.complete, settings.seconds / 2)
    rate = calls_per_second(run.queue, run.wait, len(durations))
    return InferResult(
        model=str(choice.model),
        engine=run.engine,
        precision=choice.precision,
        device=run.device,
        data=run.data,
        bucket=str(bucket),
        batch=batch,
        iterations=len(durations),
        images_per_second=batch * rate,
        latency=latency_from_seconds(durations),
        peak_memory_mib=peak_memory_mib(run.memory),
        memory=run.memory,
    )


def _reason_from(error: Exception) -> str:
    """What a user can make of it: our own sentence, or the first line of another's."""
    own, _, _ = __name__.partition(".")
    if type(error).__module__.startswith(f"{own}."):
        return str(error)
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
