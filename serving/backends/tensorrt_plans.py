"""Loading and execution of plans of TensorRT and TensorRT-RTX, which share one Python interface.

GPU memory is passed as an integer address, and a CUDA stream as an integer handle. Module
`gpu_execution` allocates and releases both.
"""

import contextlib
import hashlib
import importlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ...model.bundle.manifest import Artifact, BatchProfile, EngineKind
from ...model.bundle.spec import INPUT_NAMES, OUTPUT_NAMES
from ...plugins.runtime.user_cache import cache_folder, write_cached
from ...plugins.tensorrt.log import ERRORS, add_listener, errors_of, shared_logger
from ..errors import BackendError
from .base import TensorSpec, batch_sizes
from .plan_checks import RUNTIMES, remedy_from_reason

_log = logging.getLogger(__name__)

_Returned = TypeVar("_Returned")


def cache_path(plan_hashes: Iterable[str]) -> Path:
    """Return the path of the `RuntimeCache` file for plans, given their SHA-256 digests."""
    digest = hashlib.sha256("\n".join(plan_hashes).encode()).hexdigest()
    return cache_folder("tensorrt-rtx") / digest


class RuntimeCache:
    """Cache of the kernels that TensorRT-RTX compiles for this GPU, shared by a backend's engines.

    The cache only saves time. TensorRT-RTX rejects entries that another machine or another version
    of TensorRT-RTX wrote, and compiles the kernels again. An unreadable or unwritable file is
    ignored.
    """

    def __init__(self, path: Path) -> None:
        """Create a cache that is stored in a file, which need not exist."""
        self._path = path
        self._cache: Any = None

    def config_for(self, engine: Any) -> Any:
        """Return an `IRuntimeConfig` for an `ICudaEngine`, with this object as the kernel cache.

        The CUDA context must be current.
        """
        config = engine.create_runtime_config()
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            with contextlib.suppress(OSError):
                self._cache.deserialize(self._path.read_bytes())
        config.set_runtime_cache(self._cache)
        return config

    def store(self) -> None:
        """Write the cache file atomically. `config_for` must have been called."""
        write_cached(self._path, bytes(self._cache.serialize()))

    def close(self) -> None:
        """Release TensorRT-RTX's cache. The CUDA context must be current."""
        self._cache = None


class PlanRuntime:
    """TensorRT or TensorRT-RTX runtime. Failed calls raise BackendError with the logged reason."""

    def __init__(self, kind: EngineKind, cache: RuntimeCache | None = None) -> None:
        """Create a TensorRT or TensorRT-RTX runtime.

        Args:
            kind: Engine kind of the plans: `tensorrt` or `tensorrt-rtx`.
            cache: Cache of compiled kernels, for TensorRT-RTX only. None: no cache.
        """
        trt = self.trt = importlib.import_module(RUNTIMES[kind].module)
        self._name = f"{RUNTIMES[kind].title} {trt.__version__}"
        self._runtime_cache = cache
        _log_messages(trt)
        self._loader = trt.Runtime(shared_logger(trt))

    def engine_from(self, path: Path, is_version_compatible: bool = False) -> Any:
        """Load a plan and return its `ICudaEngine`.

        Args:
            path: Plan file.
            is_version_compatible: Whether the plan contains code that runs the plan in newer
                TensorRT versions. If so, the runtime may execute this code.

        Raises:
            BackendError: the runtime rejects the plan. The message contains the reason.
        """
        plan = path.read_bytes()
        # A version-compatible plan contains the code that runs it in newer versions. The runtime
        # executes such code only if that is allowed. Bundles are trusted.
        self._loader.engine_host_code_allowed = is_version_compatible
        return self.checked(
            partial(self._loader.deserialize_cuda_engine, plan),
            f"load {path}",
            "export the bundle again on this machine",
        )

    def context_of(self, engine: Any) -> Any:
        """Create an `IExecutionContext` of an engine.

        The caller must give the context scratch memory before the first batch; see
        `Plan.use_scratch`.

        Raises:
            BackendError: the runtime fails.
        """
        strategy = self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._runtime_cache is None:
            create = partial(engine.create_execution_context, strategy)
        else:
            config = self._runtime_cache.config_for(engine)
            config.set_execution_context_allocation_strategy(strategy)
            create = partial(engine.create_execution_context, config)
        return self.checked(create, "create a context")

    def checked(
        self, call: Callable[[], _Returned], task: str, remedy: str = "export the bundle again"
    ) -> _Returned:
        """Call a function of the runtime and return its value.

        Args:
            call: Function that returns None or False, or raises RuntimeError, if it fails.
            task: Text after "cannot" in the error message.
            remedy: Remedy in the error message if `remedy_from_reason` does not know the error.

        Raises:
            BackendError: `call` failed. The message has the first error logged during the call.
        """
        returned, raised = None, ""
        with errors_of(self.trt) as errors:
            try:
                returned = call()
            except RuntimeError as error:  # some functions raise instead of returning False
                raised = str(error)
        if returned is None or returned is False:
            reason = errors[0] if errors else raised or "no error was logged"
            remedy = remedy_from_reason(reason) or remedy
            raise BackendError(f"{self._name} cannot {task} ({reason}); {remedy}")
        return returned


@cache
def _log_messages(trt: Any) -> None:
    """Start forwarding TensorRT's log messages to Python's logging.

    `trt` is the module `tensorrt` or `tensorrt_rtx`. Later calls with the same module have no
    effect.
    """

    def log_message(severity: str, message: str) -> None:
        is_notable = severity == "WARNING" or severity in ERRORS
        _log.log(logging.INFO if is_notable else logging.DEBUG, message)

    add_listener(trt, log_message)


class _BatchContext(NamedTuple):
    """`IExecutionContext` for one batch size, with shape and dtype of each input and output."""

    context: Any
    specs: dict[str, TensorSpec]


class Plan:
    """TensorRT engine for one input size, with one execution context per batch size.

    All contexts share one scratch memory, so they must run in one stream.
    """

    def __init__(
        self, runtime: PlanRuntime, path: Path, artifact: Artifact, max_batch: int
    ) -> None:
        """Load the plan file `path`, and create the plan's execution contexts.

        `artifact` is the plan's entry in the bundle's manifest. The CUDA context must be current.
        The constructor queues work on the GPU. The caller must wait for this work before the first
        batch.

        Raises:
            BackendError: the plan fails to load or its largest batch is below `max_batch`.
        """
        build = artifact.engine
        assert build is not None  # guaranteed by the manifest
        profiles = batch_profiles(build.profiles, max_batch)
        self._runtime = runtime
        self._engine = runtime.engine_from(path, build.version_compatible)
        self._batches: dict[int, _BatchContext] = {}
        for batch, profile in profiles.items():
            # One context per batch size: a CUDA graph is valid only while the shapes of its context
            # do not change, and TensorRT leaks GPU memory each time that a plugin's shapes change
            # (https://github.com/NVIDIA/TensorRT/issues/4849).
            context = self._context(profile)
            self._set_shapes(context, batch)
            self._batches[batch] = _BatchContext(context, self._specs(context))
        sizes = map(self._engine.get_device_memory_size_for_profile_v2, set(profiles.values()))
        # Scratch memory in bytes that a context needs while it computes.
        self.scratch_bytes = max(sizes)

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes that the plan computes, in ascending order."""
        return tuple(self._batches)

    def batch_for(self, count: int) -> int:
        """Return the smallest of the plan's batch sizes that holds `count` images.

        Raises:
            BackendError: `count` exceeds the largest batch size.
        """
        for batch in self._batches:
            if batch >= count:
                return batch
        raise BackendError(
            f"the batch has {count} images, but the backend was loaded for at most "
            f"{max(self._batches)}; load it with a larger max_batch (--max-batch)"
        )

    def specs(self, batch: int) -> dict[str, TensorSpec]:
        """Return shape and dtype of each input and output by name, for a loaded batch size."""
        return self._batches[batch].specs

    def use_scratch(self, address: int, size: int) -> None:
        """Set the scratch memory that all execution contexts of this plan share.

        Args:
            address: GPU address of the memory.
            size: Size of the memory in bytes, at least `scratch_bytes`.
        """
        for batch_context in self._batches.values():
            batch_context.context.set_device_memory(address, size)

    def launch(self, batch: int, addresses: Mapping[str, int], stream: int) -> None:
        """Queue a batch on a stream. Call this method from one thread at a time.

        Args:
            batch: One of `batches`.
            addresses: GPU address of each input and output by name.
            stream: Handle of the CUDA stream.

        Raises:
            BackendError: the runtime fails.
        """
        context = self._batches[batch].context
        for name, address in addresses.items():
            self._runtime.checked(
                partial(context.set_tensor_address, name, address), f"set the address of {name}"
            )
        compute = partial(context.execute_async_v3, stream)
        self._runtime.checked(compute, f"compute a batch of {batch}", "restart the process")

    def _context(self, profile: int) -> Any:
        context = self._runtime.context_of(self._engine)
        select = partial(context.set_optimization_profile_async, profile, 0)
        self._runtime.checked(select, f"select profile {profile}")
        return context

    def _set_shapes(self, context: Any, batch: int) -> None:
        for name in INPUT_NAMES:
            shape = (batch, *tuple(self._engine.get_tensor_shape(name))[1:])
            self._runtime.checked(
                partial(context.set_input_shape, name, shape),
                f"set the shape of {name} to {shape}",
            )

    def _specs(self, context: Any) -> dict[str, TensorSpec]:
        trt = self._runtime.trt
        return {
            name: TensorSpec(
                tuple(context.get_tensor_shape(name)),
                np.dtype(trt.nptype(self._engine.get_tensor_dtype(name))),
            )
            for name in (*INPUT_NAMES, *OUTPUT_NAMES)
        }


def batch_profiles(profiles: Sequence[BatchProfile], max_batch: int) -> dict[int, int]:
    """Choose the batch sizes of a plan, and the TensorRT optimization profile of each.

    The batch sizes are those of `batch_sizes(max_batch)`. For each size, choose the profile whose
    range includes the size. If no range includes it, choose a profile for larger batches, and
    increase the size to the minimum of this profile. If several profiles qualify, choose the one
    with the lowest maximum.

    Args:
        profiles: Optimization profiles of the plan, each for a range of batch sizes.
        max_batch: Maximum batch size.

    Returns:
        Map from batch size, in ascending order, to the index of its profile in `profiles`.

    Raises:
        BackendError: `max_batch` exceeds the maximum of every profile.
    """
    largest = max(profile.max for profile in profiles)
    if max_batch > largest:
        raise BackendError(
            f"--max-batch is {max_batch}, but the plan's largest batch is {largest}; lower "
            f"--max-batch to {largest}, or export the engine with `--batch {max_batch}`"
        )
    chosen: dict[int, int] = {}
    for size in batch_sizes(max_batch):
        fitting = [index for index, profile in enumerate(profiles) if profile.max >= size]
        # Prefer a profile that needs no padding, then the smallest profile.
        best = min(fitting, key=lambda i: (profiles[i].min > size, profiles[i].max))
        chosen[max(size, profiles[best].min)] = best
    return chosen
