"""An engine that is measured, in a process that it has for itself."""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from ..model.spec import ShapeBucket
from .engines import Engine, EngineChoice, Run
from .images import batch_from_encoded, noise_jpeg
from .infer import Answer, InferResult, InferSettings, failure_of
from .latency import latency_from_seconds
from .memory import peak_memory_mib, reset_peak_memory
from .stages import StageTimes, measure_stages
from .timing import calls_per_second, durations_of

_WARMUP_SHARE = 0.2


def measure_engine(
    choice: EngineChoice, bucket: ShapeBucket, settings: InferSettings
) -> Iterator[Answer]:
    """Measure one batch size after the other, the smallest first; what fails is an answer too."""
    try:
        engine = choice.load(bucket, max(settings.batches))
        encoded = settings.images or [noise_jpeg(bucket)]
        images = batch_from_encoded(encoded, bucket, max(settings.batches))
    except Exception as error:
        yield failure_of(choice, None, _reason_from(error))
        return
    batches = [images[:batch] for batch in sorted(settings.batches)]

    def speed(run: Run, batch: int) -> InferResult:
        return _measure_speed(choice, run, bucket, batch, settings)

    def stages(run: Run, batch: int) -> StageTimes | None:
        is_profiled = (run.engine, run.device, run.data) == ("torch", "cuda", "device")
        return measure_stages(run, choice.precision, batch) if is_profiled else None

    yield from _measure_batches(choice, engine, batches, speed)
    if settings.with_stages and choice.precision == settings.precisions[0]:
        # After all else, as a profiler may slow down what follows it.
        yield from _measure_batches(choice, engine, batches, stages)


def _measure_batches(
    choice: EngineChoice,
    engine: Engine,
    batches: list[NDArray[np.uint8]],
    measure: Callable[[Run, int], Answer | None],
) -> Iterator[Answer]:
    for images in batches:
        reset_peak_memory()
        try:
            for run in engine.runs_over(images):
                answer = measure(run, len(images))
                if answer is not None:
                    yield answer
        except Exception as error:  # of any library: that memory is short has many names
            yield failure_of(choice, len(images), _reason_from(error))


def _measure_speed(
    choice: EngineChoice, run: Run, bucket: ShapeBucket, batch: int, settings: InferSettings
) -> InferResult:
    durations_of(run.complete, _WARMUP_SHARE * settings.seconds, settings.warmup)
    detections = sum(run.counts_in(run.complete()))
    durations = durations_of(run.complete, settings.seconds / 2)
    rate = len(durations) / sum(durations)
    if run.wait is not None:
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
        detections_per_image=float(detections / batch),
    )


def _reason_from(error: Exception) -> str:
    """What a user can make of it: our own sentence, or the first line of another's."""
    own, _, _ = __name__.partition(".")
    if type(error).__module__.startswith(f"{own}."):
        return str(error)
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
