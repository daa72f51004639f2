"""Base class of the TensorRT and TensorRT-RTX engine builders, and optimization profiles."""

import importlib
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Console
from rich.progress import Progress

from ...model.bundle.manifest import (
    BatchProfile,
    EngineBuild,
    EngineKind,
    Precision,
    current_platform,
)
from ...plugins.tensorrt.log import messages_to, shared_logger
from ..errors import EngineError
from .build_log import BuildLog, BuildProgress, progress_monitor
from .engine_graph import load_model
from .layers import Layer, PrecisionError, check_precision
from .options import EngineOptions

_log = logging.getLogger(__name__)

# Lowest compute capability with fp8 arithmetic.
_FP8_CAPABILITY = 8.9
# TensorRT reports out-of-memory in several wordings.
_OUT_OF_MEMORY = re.compile(
    r"out\s?of\s?memory|(insufficient|enough free) memory|bad_alloc", re.IGNORECASE
)


def profiles_from_batches(
    batches: Sequence[int], one_per_size: bool = False
) -> tuple[BatchProfile, ...]:
    """Return one TensorRT optimization profile per batch size, optimized for that size.

    A profile's range ends at its batch size, and starts above the next smaller size in `batches`.
    If `one_per_size` is set, return a profile for each size from 1 to the largest of `batches`.

    >>> [(p.min, p.opt, p.max) for p in profiles_from_batches((8, 1))]
    [(1, 1, 1), (2, 8, 8)]
    """
    sizes = list(range(1, max(batches) + 1)) if one_per_size else sorted(set(batches))
    below = (0, *sizes)
    return tuple(
        BatchProfile(min=last + 1, opt=size, max=size)
        for last, size in zip(below, sizes, strict=False)
    )


class EngineBuilder(ABC):
    """Base class of the engine builders. One builder makes all engines of its kind in an export."""

    kind: ClassVar[EngineKind]
    # Name of TensorRT or TensorRT-RTX in messages.
    product: ClassVar[str]

    def __init__(self, options: EngineOptions, log: BuildLog) -> None:
        """Import the TensorRT module, and check that this machine can build for the target GPUs.

        Raises:
            ModuleNotFoundError: TensorRT or TensorRT-RTX is not installed.
            EngineError: this machine cannot build for the target GPUs.
        """
        self._trt: Any = importlib.import_module(self.kind.replace("-", "_"))
        self._options = options
        self._log = log
        self._logger = shared_logger(self._trt)
        one_per_size = options.profile_per_batch and self.kind == "tensorrt"
        self._profiles = profiles_from_batches(options.batches, one_per_size)
        self._compute_capabilities = self._target()

    def check(self, precisions: Sequence[Precision]) -> None:
        """Raise EngineError if `precisions` contains fp8 and a target GPU does not support it."""
        old = [c for c in self._compute_capabilities if float(c) < _FP8_CAPABILITY]
        if "fp8" in precisions and old:
            raise EngineError(
                f"GPUs of compute capability {', '.join(old)} do not compute in fp8, which needs "
                f"{_FP8_CAPABILITY} or later; choose later GPUs with --compute-capability, or "
                "another precision"
            )

    def build(self, onnx_path: Path, plan_path: Path, precision: Precision) -> EngineBuild:
        """Build an engine from an ONNX file and write it to `plan_path`.

        Args:
            onnx_path: ONNX file that `onnx_from_model` exported in the types of `precision`.
            plan_path: engine file to write.
            precision: precision of the engine. `fp32` and `tf32` differ in a builder flag only.

        Returns:
            Versions, supported GPUs and profiles of the engine, for the manifest.

        Raises:
            EngineError: TensorRT cannot build the engine, or the GPU's driver does not support the
                plugins. Or the option `strict` is set, and the engine computes in another
                precision.
            KeyboardInterrupt: the user interrupted the build. The build has stopped.
        """
        model, plugins = self._load_model(onnx_path)
        console = Console(stderr=True)
        with (
            self._log.section(plan_path.name),
            messages_to(self._trt, self._log.write),
            Progress(console=console, transient=True, disable=not console.is_terminal) as bars,
            ThreadPoolExecutor(max_workers=1) as pool,
        ):
            progress = BuildProgress(bars)
            try:
                # Build in another thread. In the main thread, a KeyboardInterrupt may be raised
                # inside a callback of TensorRT, and TensorRT would swallow it.
                plan = pool.submit(
                    self._build_plan, model, plan_path.name, precision, progress
                ).result()
            except KeyboardInterrupt:
                progress.cancel()
                raise
        plan_path.write_bytes(plan)
        return EngineBuild(
            runtime_version=self._trt.__version__,
            compute_capabilities=self._compute_capabilities,
            cuda_version=_cuda_version(self._trt),
            platform=current_platform(),
            plugins=plugins,
            profiles=self._profiles,
            **self._requirements(bool(plugins)),
        )

    @abstractmethod
    def _target(self) -> tuple[str, ...]:
        """Return the compute capabilities that the engines will support, such as `9.0`."""

    @abstractmethod
    def _network_flags(self) -> int:
        """Return the flags for `create_network` of TensorRT's builder."""

    @abstractmethod
    def _prepare(self, config: Any) -> None:
        """Set the options of `config`, an `IBuilderConfig`, that only the subclass needs."""

    @abstractmethod
    def _layers_of(self, plan: Any, model: bytes) -> list[Layer]:
        """Return the layers of the serialized engine `plan`, built from the ONNX model `model`."""

    def _requirements(self, has_plugins: bool) -> dict[str, Any]:
        """Return the manifest fields that only the subclass adds, such as `gpu_name`, by name.

        `has_plugins` states whether the engine uses plugins of this project.
        """
        return {}

    def _load_model(self, onnx_path: Path) -> tuple[bytes, dict[str, str]]:
        """Return the serialized ONNX model, and the versions of the plugins that it uses."""
        return load_model(onnx_path).SerializeToString(), {}

    def _build_plan(
        self, model: bytes, name: str, precision: Precision, progress: BuildProgress
    ) -> Any:
        """Build an engine, check its precision, and return the serialized engine.

        `model` is a serialized ONNX model. `name` is the engine's name in log and error messages.
        """
        builder = self._trt.Builder(self._logger)
        network = builder.create_network(self._network_flags())
        # The network refers to weights of the parser, so keep the parser until the build ends.
        parser = self._trt.OnnxParser(network, self._logger)
        if not parser.parse(model):
            raise EngineError(self._parser_error(parser, name))
        config = self._config_for(builder, network, precision)
        config.progress_monitor = progress_monitor(self._trt, progress)
        plan = self._run(builder, network, config)
        if progress.error is not None:
            raise progress.error
        if plan is None:
            raise EngineError(self._builder_error(name))
        try:
            check_precision(self._layers_of(plan, model), precision, name)
        except PrecisionError as error:
            if self._options.strict:
                raise
            _log.warning("%s; --strict makes this an error", error)
        return plan

    def _config_for(self, builder: Any, network: Any, precision: Precision) -> Any:
        trt = self._trt
        config = builder.create_builder_config()
        # `check_precision` reads the types of layers, which are recorded at this verbosity only.
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        change = config.set_flag if precision == "tf32" else config.clear_flag
        change(trt.BuilderFlag.TF32)
        if self._options.workspace_gib is not None:
            limit = int(self._options.workspace_gib * 2**30)
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, limit)
        inputs = [network.get_input(index) for index in range(network.num_inputs)]
        for profile in self._profiles:
            shapes = builder.create_optimization_profile()
            for tensor in inputs:
                rest = tuple(tensor.shape)[1:]
                sizes = (profile.min, profile.opt, profile.max)
                shapes.set_shape(tensor.name, *((size, *rest) for size in sizes))
            config.add_optimization_profile(shapes)
        self._prepare(config)
        return config

    def _run(self, builder: Any, network: Any, config: Any) -> Any:
        """Build a TensorRT network. Return the serialized engine, or None if the build failed."""
        return builder.build_serialized_network(network, config)

    def _parser_error(self, parser: Any, name: str) -> str:
        """Return the error message for an engine file `name` whose ONNX file cannot be parsed.

        The message contains the parser's first error, the ONNX node that caused it, and a remedy.
        """
        error = parser.get_error(0)
        node = " in ".join(
            (f"{error.node_name()} ({error.node_operator()})", *error.local_function_stack()[::-1])
        )
        remedy = f"the build log is {self._log.path}"
        if error.node_operator() == "RoiAlign" and not torch.cuda.is_available():
            remedy = (
                "parsing the operator RoiAlign requires an NVIDIA GPU; export on a machine with one"
            )
        reason = " ".join(error.desc().split())
        return f"{self.product} cannot build {name} because of node {node}: {reason}; {remedy}"

    def _callback_errors(self) -> list[str]:
        """Return the errors that this project's plugins raised when TensorRT called them."""
        return []

    def _builder_error(self, name: str) -> str:
        """Return the error message for an engine file `name` that TensorRT failed to build.

        The message contains a remedy and one error: the first out-of-memory error if there is one,
        else the first error that a plugin raised, else the first that TensorRT logged.
        """
        errors = [*self._callback_errors(), *self._log.errors] or ["it gives no reason"]
        memory_errors = [error for error in errors if _OUT_OF_MEMORY.search(error)]
        remedy = f"the build log is {self._log.path}"
        if memory_errors:
            is_limited = self._options.workspace_gib is not None
            more = "allow more with --workspace" if is_limited else "free memory of the GPU"
            remedy = f"{more}, or build for smaller batches with --batch"
        return f"{self.product} cannot build {name}: {(memory_errors or errors)[0]}; {remedy}"


def _cuda_version(trt: Any) -> str:
    """Return the CUDA version that the name of TensorRT's package contains, such as `13`.

    If the name contains no version, return `unknown`.
    """
    bindings = trt.Builder.__module__.partition(".")[0]
    names = metadata.packages_distributions().get(bindings, ())
    match = re.search(r"_cu(\d+)", " ".join(names).replace("-", "_"))
    return match[1] if match else "unknown"
