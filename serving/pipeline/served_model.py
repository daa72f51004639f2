"""Served model: a bundle loaded into worker processes, and its reloads."""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from pathlib import Path
from typing import NamedTuple

from ...model.bundle.manifest import (
    MANIFEST_NAME,
    MODEL_VERSION,
    BundleError,
    Manifest,
    read_manifest,
)
from ..backends.loading import served_precision
from ..config import ServeConfig
from ..engines.base import EngineItem, EngineResult
from ..engines.bundle_engine import BundleLoader
from ..engines.worker_process import WorkerProcess, assign_resources, start_workers
from ..errors import (
    BackendError,
    InvalidRequestError,
    PrecisionNotFoundError,
    UnloadedError,
)
from ..host import call_in_parallel, in_daemon_thread
from ..monitoring.metrics import Metrics
from .batching import START_TIMEOUT_S, Batcher
from .scheduling import BatchPolicy, time_limit

ModelBatcher = Batcher[EngineItem, EngineResult]
ModelProcess = WorkerProcess[EngineItem, EngineResult]

_log = logging.getLogger(__name__)


class ModelSource(NamedTuple):
    """Model to serve: folder of its bundle (exported model), name and version."""

    # Folder of the bundle, or of its versions. It may be a symbolic link whose target changes.
    bundle: Path
    # Name of the model. None: the name in the bundle.
    name: str | None = None
    # Version. None: the newest of the versions, which are subfolders of `bundle`.
    version: str | None = MODEL_VERSION

    def resolved(self) -> "ModelSource":
        """Return a source with a definite version.

        If `version` is set, return this source. If it is None, return a source for the newest
        version V: `bundle` is then the subfolder V, and `version` is V.

        Raises:
            BundleError: `bundle` has no subfolder with a version.
        """
        if self.version:
            return self
        versions = versions_in(self.bundle)
        if not versions:
            raise BundleError(
                f"{self.bundle} has no subfolder with a version of the model; put the bundle into "
                f"a subfolder whose name is a number, such as {self.bundle / '1'}"
            )
        return ModelSource(self.bundle / versions[-1], self.name, versions[-1])

    def manifest(self) -> Manifest:
        """Read the bundle's manifest. If `name` is set, it replaces the model name in the result.

        Raises:
            BundleError: the manifest is missing or invalid.
        """
        manifest = read_manifest(self.resolved().bundle)
        return manifest.model_copy(update={"model_name": self.name}) if self.name else manifest


def versions_in(folder: Path) -> list[str]:
    """Return the versions in a folder, ascending: numeric names of subfolders with a bundle."""
    names = (path.parent.name for path in folder.glob(f"*/{MANIFEST_NAME}"))
    return sorted((name for name in names if re.fullmatch("[1-9][0-9]*", name)), key=int)


class ServedModel:
    """Bundle (exported model) that is served. Each precision has separate worker processes."""

    def __init__(self, source: ModelSource, config: ServeConfig) -> None:
        """Read the bundle's manifest.

        Args:
            source: Bundle and name of the model.
            config: Settings of the server, such as the precisions to load.

        Raises:
            BundleError: the bundle is missing, or its manifest is invalid.
        """
        # Symbolic links are resolved once: restarted workers need the files that this model was
        # loaded from, even if a link has been changed to another bundle since.
        source = source.resolved()
        self.version = source.version or MODEL_VERSION
        self.bundle = source.bundle.resolve()
        self.manifest = source._replace(bundle=self.bundle).manifest()
        self._config = config
        self._processes: dict[str, list[ModelProcess]] = {}
        # Batcher of each precision, set by `load`.
        self.batchers: dict[str, ModelBatcher] = {}
        # Names that requests may use for the model, each with the precision that it selects. None:
        # the default precision.
        self.names: dict[str, str | None] = {self.manifest.model_name: None}
        # Whether new requests are rejected.
        self.is_unloaded = False
        self._users = _Users()

    async def load(self) -> None:
        """Load the bundle. Call `close` afterwards, even if this fails.

        Raises:
            BundleError: the bundle is damaged or lacks a configured precision.
            BackendError: a backend does not run on this machine or with the maximum batch size.
        """
        config = self._config
        resources = await in_daemon_thread(assign_resources, config.workers)
        precisions = config.precision or (served_precision(self.manifest, config.backend),)
        for precision in dict.fromkeys(precisions):
            loader = BundleLoader(
                self.bundle, self.manifest, precision, config.backend, config.max_batch
            )
            self._processes[precision] = start_workers(loader, resources, config.hang_timeout_s)
        processes = [process for group in self._processes.values() for process in group]
        await asyncio.gather(*(in_daemon_thread(process.load) for process in processes))
        for process in processes:
            if process.is_spare:
                process.kill()
        policy = BatchPolicy(config.max_batch, config.max_delay_ms / 1000, config.preferred_batch)
        self.batchers = {
            precision: Batcher([process for process in group if not process.is_spare], policy)
            for precision, group in self._processes.items()
        }
        name = self.manifest.model_name
        self.names |= {f"{name}-{precision}": precision for precision in self.batchers}

    @property
    def precisions(self) -> tuple[str, ...]:
        """Served precisions; the first is the default."""
        return tuple(self.batchers)

    def batcher(self, precision: str | None = None) -> ModelBatcher:
        """Return the batcher of `precision`, or of the default precision if that is None.

        Raises:
            PrecisionNotFoundError: the precision is not served.
        """
        try:
            return self.batchers[precision or self.precisions[0]]
        except KeyError:
            raise PrecisionNotFoundError(
                f"precision {precision!r} is not served; choose from {', '.join(self.precisions)}"
            ) from None

    def check_precision(self, name: str, precision: str | None) -> None:
        """Check that a request's model name and its option `precision` agree.

        Args:
            name: Model name in the request. It may have a precision suffix, as in `NAME-fp16`.
            precision: Requested precision. None: the default precision.

        Raises:
            InvalidRequestError: `name` has the suffix of another precision.
        """
        suffix = self.names.get(name)
        if suffix not in (None, precision):
            raise InvalidRequestError(
                f"precision is {precision!r}, but model {name!r} computes in {suffix}; leave out "
                f"precision, or the suffix -{suffix} of the model name"
            )

    @property
    def states(self) -> dict[str, bool]:
        """Map from model name (NAME or NAME-PRECISION) to whether it can process requests now."""
        # Metrics are also collected before the model is loaded. It has no batchers then.
        is_loaded = bool(self.batchers) and not self.is_unloaded
        return {
            name: is_loaded and self.batcher(precision).is_up
            for name, precision in self.names.items()
        }

    def use(self) -> contextlib.AbstractContextManager[None]:
        """Count the model as in use within the `with` block. `unused` waits until the block ends.

        Raises:
            UnloadedError: the model is unloaded.
        """
        if self.is_unloaded:
            name = self.manifest.model_name
            raise UnloadedError(
                f"model {name!r} is unloaded; load it with RepositoryModelLoad, as tritonclient's "
                f"load_model({name!r}) does, or send SIGHUP to the server"
            )
        return self._users

    async def unused(self) -> None:
        """Wait until no request uses the model: until all `with` blocks of `use` have ended."""
        await self._users.none_left.wait()

    async def warm_up(self) -> float:
        """Warm up all precisions. Requests that arrive meanwhile are queued.

        Returns:
            Estimated service time in seconds per image. On a CPU: the service time of the slowest
            precision with all workers busy. On a GPU: 0 (no estimate), because the warm-up's
            duration includes compilation.
        """
        image_s = 0.0
        for batcher in self.batchers.values():
            start = time.monotonic()
            await batcher.warm_up()
            # On a CPU, the warm-up of a worker runs the model on one image per bucket. An
            # end-to-end engine then also processes one image per bucket from decoding to encoding.
            # On a GPU, the duration of the warm-up includes compilation, so it is not used.
            if batcher.info.device == "cpu":
                per_bucket = 2 if batcher.info.is_end_to_end else 1
                images = per_bucket * len(batcher.info.buckets) * batcher.engines_up
                image_s = max(image_s, (time.monotonic() - start) / images)
        return image_s

    async def run(self) -> None:
        """Run the batchers of all precisions until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for batcher in self.batchers.values():
                tasks.create_task(batcher.run())

    def close(self) -> None:
        """Wait for the in-flight batches and end the worker processes. Idempotent."""
        call_in_parallel([batcher.close for batcher in self.batchers.values()])
        for group in self._processes.values():  # if `load` failed, no batcher owns them
            for process in group:
                process.kill()


class _Users(contextlib.AbstractContextManager[None]):
    """Number of requests that use a model. A request is counted within a `with` block."""

    def __init__(self) -> None:
        self._count = 0
        # Set while no request uses the model.
        self.none_left = asyncio.Event()
        self.none_left.set()

    def __enter__(self) -> None:
        self._count += 1
        self.none_left.clear()

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count:
            self.none_left.set()


class ModelLifecycle:
    """Owner of the served model; reloads or unloads it while requests are in flight.

    Requests finish with the model that they started with. A replaced model is closed when its last
    request has finished.
    """

    def __init__(self, source: ModelSource, config: ServeConfig, metrics: Metrics) -> None:
        """Create the initial model. The caller loads it with `ServedModel.load`.

        Args:
            source: Bundle and name of the model.
            config: Settings of the server.
            metrics: Metrics that count reloads.

        Raises:
            BundleError: the bundle is missing, or its manifest is invalid.
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
                old and the new model, or loading takes longer than 600 s per precision.
            ReloadError: another served model has one of the names of the reloaded model.
        """
        async with self._changing:
            try:
                model = await self._load_within_limit()
            except Exception as error:
                _log.error(
                    "reloading the bundle of model %s failed, and the old model %s: %s",
                    self.model.manifest.model_name,
                    "stays unloaded" if self.model.is_unloaded else "is still served",
                    error,
                )
                raise
            released = self._release()
            self.model = model
            # An empty context: the task outlives the request that triggers the reload, so it must
            # not inherit that request's log ID and trace.
            self._running = self._tasks.create_task(model.run(), context=Context())
            _log.info(
                "reloaded the bundle of model %s: %s", model.manifest.model_name, model.bundle
            )
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
        """Start a task that closes the model once it is unused.

        Returns:
            Future that completes when the model is closed. Cancelling it does not stop the task.
        """
        release = _release_when_unused(self.model, self._running)
        return asyncio.shield(self._tasks.create_task(release, context=Context()))


async def _release_when_unused(model: ServedModel, running: asyncio.Task[None]) -> None:
    """Wait for a model's in-flight requests, cancel its task `running`, and close the model."""
    try:
        await model.unused()
    finally:
        running.cancel()
        await asyncio.wait([running])
        await in_daemon_thread(model.close)
