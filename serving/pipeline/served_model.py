"""Served model: a bundle loaded into worker processes, in one or more precisions."""

import asyncio
import contextlib
import re
import time
from collections.abc import Iterator
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
from ..engines.bundle_engine import BundleLoader
from ..engines.worker_process import WorkerProcess, assign_resources, start_workers
from ..errors import InvalidRequestError, UnloadedError
from ..steps.base import EngineItem, EngineResult
from .batching import Batcher
from .scheduling import BatchPolicy
from .threads import in_daemon_thread

ModelBatcher = Batcher[EngineItem, EngineResult]
ModelProcess = WorkerProcess[EngineItem, EngineResult]


class ModelSource(NamedTuple):
    """Bundle to serve, and the name of the model."""

    # Folder of the bundle, or of its versions. It may be a symbolic link whose target changes.
    bundle: Path
    # Name of the model. None: the name in the bundle.
    name: str | None = None
    # Version. None: the newest in `bundle`, whose subfolders are versions.
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
                f"{self.bundle} has no version of a model; put each bundle into a subfolder with a "
                f"number, such as {self.bundle / '1'}"
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
    """Return the numeric names of the subfolders with a bundle, in ascending numerical order."""
    names = (path.parent.name for path in folder.glob(f"*/{MANIFEST_NAME}"))
    return sorted((name for name in names if re.fullmatch("[1-9][0-9]*", name)), key=int)


class ServedModel:
    """Bundle that is served. Each precision has its own workers and its own `Batcher`."""

    def __init__(self, source: ModelSource, config: ServeConfig) -> None:
        """Read the bundle's manifest.

        Args:
            source: Bundle and name of the model.
            config: Settings of the server, such as the precisions to load.

        Raises:
            BundleError: the bundle is missing.
        """
        # Symbolic links are resolved once: restarted workers need the files that this model was
        # loaded from, even if a link leads to a new bundle by then.
        source = source.resolved()
        self.version = source.version or MODEL_VERSION
        self._bundle = source.bundle.resolve()
        self.manifest = source._replace(bundle=self._bundle).manifest()
        self._config = config
        self._processes: dict[str, list[ModelProcess]] = {}
        # Batcher of each precision, set by `load`.
        self.batchers: dict[str, ModelBatcher] = {}
        # Names that requests may use for the model, and their precision. None: the default.
        self.names: dict[str, str | None] = {self.manifest.model_name: None}
        # Whether new requests are rejected.
        self.is_unloaded = False
        # Number of requests in the `use` context.
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

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
                self._bundle, self.manifest, precision, config.backend, config.max_batch
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
        """Return the batcher of a precision. None: the default precision.

        Raises:
            InvalidRequestError: the precision is not served.
        """
        try:
            return self.batchers[precision or self.precisions[0]]
        except KeyError:
            raise InvalidRequestError(
                f"precision {precision!r} is not served; choose from {', '.join(self.precisions)}"
            ) from None

    @property
    def states(self) -> dict[str, bool]:
        """Map each name of the model (NAME, NAME-PRECISION) to whether it can process requests."""
        return {
            name: not self.is_unloaded and self.batcher(precision).is_up
            for name, precision in self.names.items()
        }

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Count the model as in use within the `with` block, so that `unused` waits.

        Raises:
            UnloadedError: the model is unloaded.
        """
        if self.is_unloaded:
            name = self.manifest.model_name
            raise UnloadedError(
                f"model {name!r} is unloaded; load it with RepositoryModelLoad, as tritonclient's "
                f"load_model({name!r}) does, or send SIGHUP to the server"
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
        """Wait until no request is within a `with` block of `use`."""
        await self._unused.wait()

    async def warm_up(self) -> float:
        """Warm up all precisions. Requests that arrive meanwhile are queued.

        Returns:
            Estimated service time in seconds per image. On a CPU, it is that of the slowest
            precision with all workers busy. On a GPU, it is 0 (no estimate), because the warm-up's
            duration includes compilation.
        """
        image_s = 0.0
        for batcher in self.batchers.values():
            start = time.monotonic()
            await batcher.warm_up()
            # On a CPU, each worker computes one image per bucket, and an end-to-end engine computes
            # another one in all its steps. On a GPU, the warm-up also compiles the model, so its
            # duration tells nothing about an image.
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
        for batcher in self.batchers.values():
            batcher.close()
        for group in self._processes.values():  # if `load` failed, no batcher owns them
            for process in group:
                process.kill()
