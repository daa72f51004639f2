"""Pipelines that process inference requests, one per served model, and the repository of models."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...model.bundle.manifest import BundleError
from ..config import ServeConfig
from ..detections import DetectionOptions, ResponseEncoder, SchedulingOptions, TimedResponse, Timing
from ..engines.base import EngineItem, EngineResult, SourceImage
from ..engines.host_steps import HostProcessor
from ..errors import ModelNotFoundError, QueueFullError, ReloadError, ServingError
from ..host import call_in_parallel, in_daemon_thread
from ..monitoring.telemetry import Telemetry
from .admission import AdmissionController
from .batching import BatchResult
from .scheduling import Reservation, TimedResult, timed
from .served_model import ModelBatcher, ModelLifecycle, ModelSource, ServedModel
from .shared_resources import SharedResources

# Minimum number of admission slots, however slow the model is: the slots of two batches, or 32 if
# that is more. With two batches, one can fill while the other is computed. 32 slots suffice for the
# usual Triton clients.
_MIN_BATCHES, _MIN_SLOTS = 2, 32

_log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class InferenceRequest:
    """Request to detect objects in one image."""

    source: SourceImage
    options: DetectionOptions
    scheduling: SchedulingOptions
    encoder: ResponseEncoder


class Pipeline:
    """Processor of a model's inference requests.

    Call `detect` within the `with` block of `lifecycle.running()`.
    """

    def __init__(
        self, source: ModelSource, config: ServeConfig, resources: SharedResources
    ) -> None:
        """Create a pipeline. The caller loads its model with `ServedModel.load`.

        Args:
            source: Bundle and name of the model.
            config: Settings of the server.
            resources: Threads, memory and limits that all models share.

        Raises:
            BundleError: the bundle is missing, or its manifest is invalid.
        """
        self.telemetry = resources.telemetry
        self.lifecycle = ModelLifecycle(source, config, self.telemetry.metrics)
        self._config = config
        self.admission = AdmissionController(
            config.queue_size,
            config.max_wait_s,
            min_capacity=max(_MIN_SLOTS, _MIN_BATCHES * config.max_batch),
        )
        self.rate_limits = resources.rate_limits
        self.threads = resources.threads
        self.decode_memory = resources.decode_memory

    @property
    def model(self) -> ServedModel:
        """Model that processes new requests. A reload replaces it."""
        return self.lifecycle.model

    @property
    def stream_window(self) -> int:
        """Maximum number of in-flight images of one streaming gRPC call.

        They fill all batches that the model's workers can have in flight, and one more.
        """
        return (self.model.batcher().concurrency + 1) * self._config.max_batch

    async def detect(self, request: InferenceRequest, model: ServedModel) -> TimedResponse[Any]:
        """Detect objects in an image and return the encoded response.

        If the calling task is cancelled, the image leaves the queue immediately.

        Args:
            request: The request. The caller must apply its `scheduling.timeout_s`, with
                `request_deadline`.
            model: Model to use. Call `detect` within the `with` block of `model.use()`.

        Raises:
            ImageError: the image is invalid, or decoding it needs more memory than the server
                allows per image.
            PrecisionNotFoundError: the requested precision is not served.
            BackendDownError, BackendError, BundleError: see `Batcher.infer`.
        """
        source, scheduling = request.source, request.scheduling
        precision = scheduling.precision or model.precisions[0]
        start = time.monotonic()
        with self.telemetry.tracer.image() as add_stages:
            batcher = model.batcher(precision)
            host = HostProcessor(
                options=request.options,
                encoder=request.encoder,
                manifest=model.manifest,
                engine=batcher.info,
                max_pixels=self._config.max_pixels,
            )
            del request
            preparing = self._prepare(host, source, scheduling.peer)
            # The encoded image can be large. Without this reference, it can be freed while the
            # request waits for a batch.
            del source
            decoded, reserved = await preparing
            try:
                result = await batcher.infer(decoded.value, scheduling, reserved)
            finally:
                if reserved is not None:
                    reserved.drop()
            if batcher.info.is_end_to_end:  # the engine encoded the response already
                encoded = timed(host.respond, result.value, decoded.value)
            else:
                encoded = await self.threads.run(
                    scheduling.peer, host.respond, result.value, decoded.value
                )
            self._observe(decoded, result, encoded, batcher)
            timing = _total_timing(decoded, result, encoded)
            self.telemetry.metrics.count_image(
                model.manifest.model_name, precision, timing, time.monotonic() - start
            )
            add_stages(timing)
            return TimedResponse(encoded.value.value, timing)

    async def _prepare(
        self, host: HostProcessor, source: SourceImage, peer: str
    ) -> tuple[TimedResult[EngineItem], Reservation | None]:
        """Convert an image to the engine's input.

        Returns:
            First, the engine's input, with the duration and queue time of the conversion. Second, a
            reservation of host memory for an engine that decodes the image itself. The caller must
            drop the reservation once the engine has decoded the image. None: no reservation.
        """
        small = self.decode_memory.small
        if host.is_quick(source):
            first = timed(host.prepare_small, source, small)
        else:
            first = await self.threads.run(peer, host.prepare_small, source, small)
        (item, needed), elapsed_s, waited_s = first
        reserved = None
        if needed:
            start = time.perf_counter()
            reserved = await self.decode_memory.acquire(peer, needed)
            waited_s += time.perf_counter() - start
        if item is not None:
            return TimedResult(item, elapsed_s, waited_s), reserved
        assert reserved is not None
        try:
            preparing = self.threads.run(peer, host.prepare, source, memory=reserved)
            del source
            item, own_s, own_wait_s = await preparing
        finally:
            reserved.drop()
        return TimedResult(item, elapsed_s + own_s, waited_s + own_wait_s), None

    def _observe(
        self,
        decoded: TimedResult[Any],
        result: BatchResult[EngineResult],
        encoded: TimedResult[TimedResponse[Any]],
        batcher: ModelBatcher,
    ) -> None:
        """Report the service time of one processed image to admission control.

        The service time is the longer of these two times:

        - The duration of the image's batch, divided by the batch size and by the number of batches
          that the workers can have in flight.
        - The image's decode and encode time, divided by the size of the thread pool.

        Args:
            decoded: Output of the image's decoding.
            result: Output of the image's inference.
            encoded: Output of the encoding of the image's detections.
            batcher: Batcher that computed the image's batch.
        """
        infer_s = result.infer_s / result.batch_size / batcher.concurrency
        host_s = (decoded.elapsed_s + encoded.elapsed_s) / self.threads.size
        self.admission.observe_service_time(max(infer_s, host_s))


def _total_timing(
    decoded: TimedResult[Any],
    result: BatchResult[EngineResult],
    encoded: TimedResult[TimedResponse[Any]],
) -> Timing:
    engine = encoded.value.timing
    waited_s = decoded.waited_s + result.queue_s + encoded.waited_s
    return Timing(
        decode_us=round(decoded.elapsed_s * 1e6) + engine.decode_us,
        queue_us=round(waited_s * 1e6) + engine.queue_us,
        infer_us=engine.infer_us or round(result.infer_s * 1e6),
        encode_us=round(encoded.elapsed_s * 1e6) + engine.encode_us,
        batch_size=result.batch_size,
    )


class ModelRepository:
    """Models of a server. Each model has its own queue, admission slots and workers."""

    def __init__(
        self, sources: Sequence[ModelSource], config: ServeConfig, telemetry: Telemetry
    ) -> None:
        """Create one pipeline per model. Call `load` afterwards to load the models.

        Args:
            sources: Bundles and names of the models, at least one. The first model processes the
                requests that name no model.
            config: Settings of the server.
            telemetry: Metrics and traces of the requests.

        Raises:
            BundleError: a bundle is missing, or its manifest is invalid.
            ServingError: two models have the same name.
        """
        self.resources = SharedResources(config, telemetry, len(sources))
        self.pipelines = [Pipeline(source, config, self.resources) for source in sources]
        # Pipeline that processes the requests without a model name.
        self.first = self.pipelines[0]
        self._check_names([pipeline.model.manifest.model_name for pipeline in self.pipelines])
        for pipeline in self.pipelines:
            pipeline.lifecycle.check_reloaded = partial(self._check_reloaded, pipeline)

    @property
    def states(self) -> dict[str, bool]:
        """Map from model name to whether the model can process requests now.

        A model has the name NAME for its default precision, and a name `NAME-PRECISION` for each
        served precision. The names of the first model come first.
        """
        states: dict[str, bool] = {}
        for pipeline in self.pipelines:
            states |= {n: up for n, up in pipeline.model.states.items() if n not in states}
        return states

    def find(self, name: str) -> Pipeline:
        """Return the pipeline that serves the model `name`.

        Raises:
            ModelNotFoundError: no served model has this name.
        """
        for pipeline in self.pipelines:
            if name in pipeline.model.names:
                return pipeline
        served = [own for pipeline in self.pipelines for own in pipeline.model.names]
        raise ModelNotFoundError(
            f"model {name!r} is not served; the served models are {', '.join(served)}"
        )

    def find_or_first(self, name: str) -> Pipeline:
        """Return the pipeline that serves the model `name`, or else the first model's pipeline."""
        for pipeline in self.pipelines:
            if name in pipeline.model.names:
                return pipeline
        return self.first

    async def find_loadable(self, name: str) -> Pipeline:
        """Return the pipeline that serves or can load the model `name`.

        If no pipeline serves the model, return the first one whose bundle on disk has this model
        name in its manifest.

        Raises:
            ModelNotFoundError: no served model and no manifest has this name.
            BundleError: no pipeline was found, but a bundle's manifest, which might contain the
                name, cannot be read.
        """
        try:
            return self.find(name)
        except ModelNotFoundError as error:
            failure: Exception = error
        for pipeline in self.pipelines:
            try:
                manifest = await in_daemon_thread(pipeline.lifecycle.source.manifest)
            except BundleError as error:
                failure = error
            else:
                if manifest.model_name == name:
                    return pipeline
        raise failure

    async def load(self) -> None:
        """Load all models. Call `close` afterwards, even if this fails.

        Raises:
            BundleError, BackendError: see `ServedModel.load`.
            ServingError: two models share a name. The names of a model are its own, such as
                `street`, and one for each loaded precision, such as `street-fp16`.
        """
        for pipeline in self.pipelines:
            await pipeline.model.load()
        self._check_names([name for own in self.pipelines for name in own.model.names])

    async def warm_up(self) -> None:
        """Warm up all models, and report their service times to admission control."""
        for pipeline in self.pipelines:
            pipeline.admission.set_service_time(await pipeline.model.warm_up())

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Compute the batches of all models within the `with` block."""
        async with contextlib.AsyncExitStack() as stack:
            for pipeline in self.pipelines:
                await stack.enter_async_context(pipeline.lifecycle.running())
            yield

    async def reload_when_set(self, requested: asyncio.Event) -> None:
        """Reload all models each time `requested` is set. If a reload fails, keep the old model."""
        while True:
            await requested.wait()
            requested.clear()
            for pipeline in self.pipelines:
                try:
                    await pipeline.lifecycle.reload()
                except (BundleError, ServingError):
                    pass  # `reload` has logged it
                except Exception:
                    name = pipeline.model.manifest.model_name
                    _log.exception("reloading the bundle of model %s failed", name)

    def check_admission(self, method: str, peer: str) -> None:
        """Check, before a request is read, that its connection may have one more image in flight.

        The model of the request is not known yet, so the check passes if any model of the server
        admits the image. Otherwise, the metrics count a failed request for the first model.

        Raises:
            QueueFullError: `AdmissionController.check` rejects the image at every model.
        """
        failures = []
        for pipeline in self.pipelines:
            try:
                pipeline.admission.check(peer)
            except QueueFullError as error:
                failures.append(error)
            else:
                return
        model = self.first.model
        self.resources.telemetry.reject_request(
            model.manifest.model_name, model.version, method, peer, failures[0]
        )
        raise failures[0]

    def close(self) -> None:
        """Close the thread pool that all models share, then the models."""
        self.resources.threads.close()
        # In parallel, so that workers that hang delay the end by 10 s in total, not 10 s per model.
        call_in_parallel([pipeline.model.close for pipeline in self.pipelines])

    def _check_reloaded(self, reloaded: Pipeline, model: ServedModel) -> None:
        """Raise ReloadError if a pipeline other than `reloaded` uses one of the names of `model`.

        Args:
            reloaded: Pipeline whose model is about to be replaced with `model`.
            model: The new model. Its names are NAME and one `NAME-PRECISION` per precision.
        """
        models = (model if own is reloaded else own.model for own in self.pipelines)
        self._check_names([name for own in models for name in own.names], ReloadError)

    @staticmethod
    def _check_names(names: Sequence[str], kind: type[ServingError] = ServingError) -> None:
        """Raise an error of type `kind` if two models share a name."""
        for name in names:
            if names.count(name) > 1:
                raise kind(
                    f"two models have the name {name!r}; give each model its own name, as in "
                    "`maskrcnn serve street=BUNDLE indoor=OTHER_BUNDLE`"
                )
