"""Repository of the served models: one pipeline per model, and resources that all models share."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial

from ...model.bundle.manifest import BundleError
from ..config import ServeConfig
from ..errors import ModelNotFoundError, QueueFullError, ReloadError, ServingError
from ..host import in_daemon_thread
from ..monitoring.telemetry import Telemetry
from .pipeline import Pipeline
from .served_model import ModelSource, ServedModel
from .shared_resources import SharedResources

_log = logging.getLogger(__name__)


class ModelRepository:
    """Models of a server. Each has a queue, admission slots and workers of its own."""

    def __init__(
        self, sources: Sequence[ModelSource], config: ServeConfig, telemetry: Telemetry
    ) -> None:
        """Create the pipelines. Call `load` afterwards.

        Args:
            sources: Bundles and names of the models, at least one. The first model processes the
                requests that name no model.
            config: Settings of the server.
            telemetry: Metrics and traces of the requests.

        Raises:
            BundleError: a bundle is missing.
            ServingError: two models have the same name.
        """
        self.resources = SharedResources(config, telemetry, len(sources))
        self.pipelines = [Pipeline(source, config, self.resources) for source in sources]
        self._check_names([pipeline.model.manifest.model_name for pipeline in self.pipelines])
        for pipeline in self.pipelines:
            pipeline.lifecycle.check_reloaded = partial(self._check_reloaded, pipeline)

    @property
    def first(self) -> Pipeline:
        """Pipeline that processes the requests without a model name."""
        return self.pipelines[0]

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
        """Return the pipeline that serves the model `name`. If none does, return `first`."""
        return next((own for own in self.pipelines if name in own.model.names), self.first)

    async def find_loadable(self, name: str) -> Pipeline:
        """Return the pipeline that serves or can load the model `name`.

        If no pipeline serves the model, return the first one whose bundle on disk has this model
        name in its manifest.

        Raises:
            ModelNotFoundError: no served model and no manifest has this name.
            BundleError: no pipeline was found, and a bundle's manifest cannot be read.
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
            ServingError: two models have a name in common. A model has the name in its bundle,
                NAME, and a name `NAME-PRECISION` for each loaded precision.
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
        """Reload all models each time `requested` is set. A model that fails to reload is kept."""
        while True:
            await requested.wait()
            requested.clear()
            for pipeline in self.pipelines:
                try:
                    await pipeline.lifecycle.reload()
                except (BundleError, ServingError):
                    pass  # `reload` has logged it
                except Exception:
                    _log.exception("reloading the bundle failed")

    def check_admission(self, method: str, peer: str) -> None:
        """Check, before a request is read, that its connection may have one more image in flight.

        The model of the request is not known yet, so it suffices that one model admits the image.
        If no model does, the metrics count a failed request for the first model.

        Raises:
            QueueFullError: no model has a free admission slot, and at each model the image exceeds
                the connection's fair share of the slots.
        """
        failures = []
        for pipeline in self.pipelines:
            try:
                pipeline.admission.check(peer)
            except QueueFullError as error:
                failures.append(error)
            else:
                return
        name = self.first.model.manifest.model_name
        self.resources.telemetry.reject_request(name, method, peer, failures[0])
        raise failures[0]

    def close(self) -> None:
        """Close the thread pool that all models share, then the models."""
        self.resources.threads.close()
        for pipeline in self.pipelines:
            pipeline.model.close()

    def _check_reloaded(self, reloaded: Pipeline, model: ServedModel) -> None:
        """Raise ReloadError if a pipeline other than `reloaded` already has a name of `model`.

        Args:
            reloaded: Pipeline that is about to replace its model by `model`.
            model: The new model. Its names are NAME and one `NAME-PRECISION` per precision.
        """
        models = (model if own is reloaded else own.model for own in self.pipelines)
        try:
            self._check_names([name for own in models for name in own.names])
        except ServingError as error:
            raise ReloadError(str(error)) from None

    @staticmethod
    def _check_names(names: Sequence[str]) -> None:
        for name in names:
            if names.count(name) > 1:
                raise ServingError(
                    f"two models have the name {name!r}; give each model its own name, as in "
                    "`maskrcnn serve street=BUNDLE indoor=OTHER_BUNDLE`"
                )
