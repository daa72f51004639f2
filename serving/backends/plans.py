"""Plans of TensorRT and TensorRT-RTX, whose Python interfaces are alike.

The engine and its contexts know addresses and streams by number alone; the memory behind them is
`device`'s.
"""

import importlib
import logging
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ...model.manifest import Artifact, EngineKind
from ...model.spec import INPUT_NAMES, OUTPUT_NAMES
from ...plugins.tensorrt_log import ERRORS, errors_of, listen, shared_logger
from ..errors import BackendError
from .base import TensorSpec
from .plan_checks import RUNTIMES, batch_profiles, remedy_from_reason
from .runtime_cache import RuntimeCache

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")


class PlanRuntime:
    """TensorRT or TensorRT-RTX, and what it has to say."""

    def __init__(self, kind: EngineKind, cache: RuntimeCache | None = None) -> None:
        """Start the runtime.

        Args:
            kind: Kind of the plans it will load.
            cache: Keeps what TensorRT-RTX compiles; TensorRT has none.
        """
        trt = self.trt = importlib.import_module(RUNTIMES[kind].module)
        self._name = f"{RUNTIMES[kind].title} {trt.__version__}"
        self._cache = cache
        _log_messages(trt)
        self._loader = trt.Runtime(shared_logger(trt))

    def engine_from(self, path: Path) -> Any:
        """The `ICudaEngine` of a plan.

        Raises:
            BackendError: the runtime refuses the plan; the message has its reason.
        """
        plan = path.read_bytes()
        return self.answer(
            partial(self._loader.deserialize_cuda_engine, plan),
            f"load {path}",
            "export the bundle again on this machine",
        )

    def context_of(self, engine: Any) -> Any:
        """A new `IExecutionContext` without scratch memory.

        Raises:
            BackendError: the runtime makes none.
        """
        strategy = self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._cache is None:
            make = partial(engine.create_execution_context, strategy)
        else:
            config = self._cache.config_for(engine)
            config.set_execution_context_allocation_strategy(strategy)
            make = partial(engine.create_execution_context, config)
        return self.answer(make, "make a context", "export the bundle again")

    def answer(self, call: Callable[[], _Answer], task: str, remedy: str) -> _Answer:
        """What the runtime answers to a call.

        Args:
            call: Gives None or False where it fails.
            task: What it is to do.
            remedy: What the user can do about a failure where the reason does not tell.

        Raises:
            BackendError: it failed; the message has the first error logged meanwhile.
        """
        with errors_of(self.trt) as errors:
            answer = call()
        if answer is None or answer is False:
            reason = errors[0] if errors else "it does not say why"
            remedy = remedy_from_reason(reason) or remedy
            raise BackendError(f"{self._name} does not {task} ({reason}); {remedy}")
        return answer


@cache
def _log_messages(trt: Any) -> None:
    """Let the log have all that TensorRT says in this process, once."""

    def note(severity: str, message: str) -> None:
        is_notable = severity == "WARNING" or severity in ERRORS
        _log.log(logging.INFO if is_notable else logging.DEBUG, message)

    listen(trt, note)


class _Step(NamedTuple):
    """A batch size that a plan is run at."""

    context: Any
    specs: dict[str, TensorSpec]


class Plan:
    """The engine of one shape bucket, ready for batches of certain sizes.

    A context stays with its optimisation profile. Where plugins are inside, it also stays with one
    batch size, since TensorRT loses GPU memory each time that a plugin meets another shape
    (https://github.com/NVIDIA/TensorRT/issues/4849). All contexts share one scratch memory, and so
    must be run in one stream.
    """

    def __init__(
        self, runtime: PlanRuntime, path: Path, artifact: Artifact, max_batch: int
    ) -> None:
        """Load a plan; the GPU is current, and to be synchronised before the first batch.

        Raises:
            BackendError: it cannot be loaded, or takes no batch of that size.
        """
        build = artifact.engine
        assert build is not None  # the manifest sees to it
        profiles = batch_profiles(build.profiles, max_batch)
        self._runtime = runtime
        self._engine = runtime.engine_from(path)
        contexts: dict[int, Any] = {}
        self._steps: dict[int, _Step] = {}
        for batch, profile in profiles.items():
            key = batch if build.plugins else profile
            if key not in contexts:
                contexts[key] = self._context(profile)
            self._set_shapes(contexts[key], batch)
            self._steps[batch] = _Step(contexts[key], self._specs(contexts[key]))
        sizes = map(self._engine.get_device_memory_size_for_profile_v2, set(profiles.values()))
        self.scratch_bytes = max(sizes)
        """Bytes of GPU memory that contexts need while they compute."""

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes it is run at, ascending."""
        return tuple(self._steps)

    def batch_for(self, count: int) -> int:
        """The smallest of the sizes that takes so many images.

        Raises:
            BackendError: none does.
        """
        for batch in self._steps:
            if batch >= count:
                return batch
        raise BackendError(
            f"a batch of {count} is larger than the {max(self._steps)} that the backend was loaded "
            "for; load it with a larger max_batch"
        )

    def specs(self, batch: int) -> dict[str, TensorSpec]:
        """Inputs and outputs of a batch of one of the sizes, by name."""
        return self._steps[batch].specs

    def use_scratch(self, address: int, size: int) -> None:
        """Let all contexts compute in GPU memory of at least `scratch_bytes`."""
        for step in self._steps.values():
            step.context.set_device_memory(address, size)

    def launch(self, batch: int, addresses: Mapping[str, int], stream: int) -> None:
        """Put a batch of one of the sizes on a stream; called by one thread at a time.

        Raises:
            BackendError: the runtime refuses.
        """
        context = self._steps[batch].context
        self._set_shapes(context, batch)
        for name, address in addresses.items():
            context.set_tensor_address(name, address)
        self._runtime.answer(
            partial(context.execute_async_v3, stream),
            f"compute a batch of {batch}",
            "restart the process",
        )

    def _context(self, profile: int) -> Any:
        context = self._runtime.context_of(self._engine)
        self._runtime.answer(
            partial(context.set_optimization_profile_async, profile, 0),
            f"take profile {profile}",
            "export the bundle again",
        )
        return context

    def _set_shapes(self, context: Any, batch: int) -> None:
        for name in INPUT_NAMES:
            shape = (batch, *tuple(self._engine.get_tensor_shape(name))[1:])
            self._runtime.answer(
                partial(context.set_input_shape, name, shape),
                f"take {name} of {shape}",
                "export the bundle again",
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
