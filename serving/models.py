"""A bundle in the server: loaded in its precisions, and released when no request uses it."""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..model.manifest import read_manifest
from .backends.loading import served_precision
from .batching import Batcher
from .config import ServeConfig
from .engine_process import load_engines
from .engines import BundleEngine, EngineItem, EngineResult
from .errors import InvalidRequestError
from .scheduling import BatchPolicy

ModelBatcher = Batcher[EngineItem, EngineResult]


class ServedModel:
    """One model; each of its precisions has engines and queues of its own."""

    def __init__(self, bundle: Path, config: ServeConfig) -> None:
        """Load a bundle, which takes a while.

        Args:
            bundle: Folder that export wrote.
            config: What to load of it, and how batches are made.

        Raises:
            BundleError: the bundle is missing, damaged or lacks a precision.
            BackendError: a backend does not run here, or not with such batches.
        """
        self.manifest = read_manifest(bundle)
        policy = BatchPolicy(config.max_batch, config.max_delay_ms / 1000, config.preferred_batch)
        asked = config.precision or (served_precision(self.manifest, config.backend),)
        precisions = tuple(dict.fromkeys(asked))
        engines = [
            BundleEngine(bundle, self.manifest, precision, config.backend, config.max_batch)
            for precision in precisions
        ]
        loaded = load_engines(engines, config.workers, config.hang_timeout_s)
        self._batchers: dict[str, ModelBatcher] = {
            precision: Batcher(processes, policy)
            for precision, processes in zip(precisions, loaded, strict=True)
        }
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

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

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Hold the model for a request within the context."""
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
        """Wait for the last batches and end the engines."""
        for batcher in self._batchers.values():
            batcher.close()
