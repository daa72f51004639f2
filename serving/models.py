"""A bundle in the server: loaded in its precisions, and released when no request uses it."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..model.manifest import read_manifest
from .backends.loading import served_precision
from .batching import Batcher
from .config import ServeConfig
from .daemon_threads import in_daemon_thread
from .engines.base import EngineItem, EngineResult
from .engines.bundle_engine import BundleEngine
from .engines.engine_process import EngineProcess, start_engines
from .engines.placement import places_for
from .errors import InvalidRequestError, UnloadedError
from .scheduling import BatchPolicy

ModelBatcher = Batcher[EngineItem, EngineResult]
ModelProcess = EngineProcess[EngineItem, EngineResult]


class ServedModel:
    """One model; each of its precisions has engines and queues of its own."""

    def __init__(self, bundle: Path, config: ServeConfig) -> None:
        """Read what the bundle is.

        Args:
            bundle: Folder that export wrote.
            config: What to load of it, and how batches are made.

        Raises:
            BundleError: the bundle is missing.
        """
        # Where it leads now: engines that start again need these files, and links are for reloads.
        self._bundle = bundle.resolve()
        self.manifest = read_manifest(self._bundle)
        self._config = config
        self._processes: dict[str, list[ModelProcess]] = {}
        self._batchers: dict[str, ModelBatcher] = {}
        self.is_unloaded = False
        """Whether it takes no requests any more."""
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    async def load(self) -> None:
        """Load the bundle, before anything is asked of it; however that ends, `close` is due.

        Raises:
            BundleError: the bundle is damaged or lacks a precision.
            BackendError: a backend does not run here, or not with such batches.
        """
        config = self._config
        places = await in_daemon_thread(places_for, config.workers)
        precisions = config.precision or (served_precision(self.manifest, config.backend),)
        for precision in dict.fromkeys(precisions):
            engine = BundleEngine(
                self._bundle, self.manifest, precision, config.backend, config.max_batch
            )
            self._processes[precision] = start_engines(engine, places, config.hang_timeout_s)
        processes = [process for group in self._processes.values() for process in group]
        await asyncio.gather(*(in_daemon_thread(process.load) for process in processes))
        for process in processes:
            if process.is_spare:
                process.kill()
        policy = BatchPolicy(config.max_batch, config.max_delay_ms / 1000, config.preferred_batch)
        self._batchers = {
            precision: Batcher([process for process in group if not process.is_spare], policy)
            for precision, group in self._processes.items()
        }

    @property
    def precisions(self) -> tuple[str, ...]:
        """What requests may ask for; the first is the default."""
        return tuple(self._batchers)

    @property
    def names(self) -> dict[str, str | None]:
        """The names that clients may call it by, and the precisions that they ask for so."""
        name = self.manifest.model_name
        return {name: None} | {f"{name}-{precision}": precision for precision in self.precisions}

    @property
    def batchers(self) -> Mapping[str, ModelBatcher]:
        """What computes, by precision."""
        return self._batchers

    def batcher(self, precision: str | None = None) -> ModelBatcher:
        """What computes in a precision, by default the first.

        Raises:
            InvalidRequestError: it is not served.
        """
        try:
            return self._batchers[precision or self.precisions[0]]
        except KeyError:
            raise InvalidRequestError(
                f"precision {precision!r} is not served; this server computes in "
                f"{', '.join(self.precisions)}"
            ) from None

    @property
    def states(self) -> dict[str, bool]:
        """By each of its names, whether requests can be answered at the moment."""
        return {
            name: not self.is_unloaded and self.batcher(precision).is_up
            for name, precision in self.names.items()
        }

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Hold the model for a request within the context.

        Raises:
            UnloadedError: it takes no requests any more.
        """
        if self.is_unloaded:
            name = self.manifest.model_name
            raise UnloadedError(
                f"model {name!r} is unloaded; load it with RepositoryModelLoad, as tritonclient's "
                f"load_model({name!r}) does, or by SIGHUP to the server"
            )
        self._users += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def unused(self) -> None:
        """Return when no request holds the model."""
        await self._unused.wait()

    async def warm_up(self) -> None:
        """Warm all precisions up; requests that arrive meanwhile wait."""
        for batcher in self._batchers.values():
            await batcher.warm_up()

    async def run(self) -> None:
        """Compute until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for batcher in self._batchers.values():
                tasks.create_task(batcher.run())

    def close(self) -> None:
        """Wait for the last batches and end the engines, unless that is done."""
        for batcher in self._batchers.values():
            batcher.close()
        for group in self._processes.values():  # what a load that failed has left
            for process in group:
                process.kill()
