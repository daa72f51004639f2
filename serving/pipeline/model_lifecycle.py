"""Lifecycle of the served model: load, run, reload, unload, close."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextvars import Context

from ..config import ServeConfig
from ..errors import BackendError
from ..monitoring.metrics import Metrics
from .batching import START_TIMEOUT_S
from .deadlines import time_limit
from .served_model import ModelSource, ServedModel
from .threads import in_daemon_thread

_log = logging.getLogger(__name__)


class ModelLifecycle:
    """Owner of the served model; reloads or unloads it while requests are in flight.

    Requests finish with the model that they started with. A replaced model is closed when its last
    request has finished.
    """

    def __init__(self, source: ModelSource, config: ServeConfig, metrics: Metrics) -> None:
        """Create the model to serve at first. The caller loads it with `ServedModel.load`.

        Args:
            source: Bundle and name of the model.
            config: Settings of the server.
            metrics: Metrics that count reloads.

        Raises:
            BundleError: the bundle is missing.
        """
        # Model for new requests.
        self.model = ServedModel(source, config)
        self.source = source
        self._config = config
        self._metrics = metrics
        # Function that is called with each reloaded model before it is served. It raises an error
        # to reject the model.
        self.check_reloaded: Callable[[ServedModel], None] = lambda _: None
        # Held during `reload` and `unload`.
        self._changing = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Within the `with` block, compute batches of the model and of models that replace it."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._running = tasks.create_task(self.model.run())
            try:
                yield
            finally:
                async with self._changing:  # a running `reload` or `unload` needs the task group
                    self._running.cancel()

    async def reload(self) -> None:
        """Load the bundle again, and replace the served model once the new one is warm.

        Call it within the `with` block of `running`. If the reload fails, the old model stays as it
        is: served or unloaded.

        Raises:
            BundleError: the bundle is missing, damaged or lacks a configured precision.
            BackendError: a backend does not run on this machine, memory does not suffice for the
                old and the new model, or loading takes too long (`_load_within_limit`).
            ReloadError: another served model has one of the names of the reloaded model.
        """
        async with self._changing:
            try:
                model = await self._load_within_limit()
            except Exception as error:
                _log.error(
                    "reloading the bundle failed, and the old model %s: %s",
                    "stays unloaded" if self.model.is_unloaded else "is still served",
                    error,
                )
                raise
            released = self._release()
            self.model = model
            # An empty context: the task outlives the request that triggers the reload, so it must
            # not inherit that request's log ID and trace.
            self._running = self._tasks.create_task(model.run(), context=Context())
            _log.info("reloaded the bundle of model %s", model.manifest.model_name)
            await released

    async def unload(self) -> None:
        """Reject new requests, and close the model when the in-flight requests have finished.

        Call it within the `with` block of `running`. `reload` loads the bundle and serves it again.
        """
        async with self._changing:
            self.model.is_unloaded = True
            await self._release()
            _log.info("unloaded model %s", self.model.manifest.model_name)

    async def _load_within_limit(self) -> ServedModel:
        """Load and warm up a new model. A disk or a driver may hang, so there is a time limit.

        Raises:
            BackendError: loading takes longer than START_TIMEOUT_S (600 s) times the number of
                precisions to load.
        """
        limit_s = START_TIMEOUT_S * max(1, len(self._config.precision))
        message = (
            f"the model is not ready after {limit_s:g} s, so loading it is cancelled; check that "
            "the bundle's disk and `nvidia-smi` respond, then load the model again"
        )
        with self._metrics.reloading():
            async with time_limit(limit_s, lambda: BackendError(message)):
                return await self._load()

    async def _load(self) -> ServedModel:
        model = await in_daemon_thread(ServedModel, self.source, self._config)
        try:
            await model.load()
            self.check_reloaded(model)
            await model.warm_up()
        except BaseException:
            await in_daemon_thread(model.close)
            raise
        return model

    def _release(self) -> asyncio.Future[None]:
        """Close the model once unused, in a task that continues even if the caller is cancelled."""
        release = _release_when_unused(self.model, self._running)
        return asyncio.shield(self._tasks.create_task(release, context=Context()))


async def _release_when_unused(model: ServedModel, running: asyncio.Task[None]) -> None:
    """Close a model after its in-flight requests have ended. Cancel its batching task `running`."""
    try:
        await model.unused()
    finally:
        running.cancel()
        await asyncio.wait([running])
        await in_daemon_thread(model.close)
