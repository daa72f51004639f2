"""From an ONNX file to an engine: what building with TensorRT and TensorRT-RTX has in common."""

import importlib
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

from ..model.manifest import (
    BatchProfile,
    EngineBuild,
    EngineKind,
    Precision,
    current_platform,
)
from ..plugins.tensorrt_log import messages_to, shared_logger
from .build_log import BuildLog
from .build_progress import BuildProgress, monitor_into
from .engine_layers import Layer, check_precision
from .engine_options import EngineOptions
from .errors import EngineError

_SHORT_OF_MEMORY = re.compile(
    r"out\s?of\s?memory|(insufficient|enough free) memory|bad_alloc", re.IGNORECASE
)


def profiles_from_batches(batches: Sequence[int]) -> tuple[BatchProfile, ...]:
    """Optimisation profiles for batch sizes: each takes those above the one before.

    >>> [(p.min, p.opt, p.max) for p in profiles_from_batches((8, 1))]
    [(1, 1, 1), (2, 8, 8)]
    """
    sizes = sorted(set(batches))
    above = (0, *sizes)
    return tuple(
        BatchProfile(min=last + 1, opt=size, max=size)
        for last, size in zip(above, sizes, strict=False)
    )


class EngineBuilder(ABC):
    """Builds engines of one kind, all with the same options."""

    kind: ClassVar[EngineKind]
    product: ClassVar[str]

    def __init__(self, options: EngineOptions, log: BuildLog) -> None:
        """Load the module that builds, and see whether this machine will do.

        Raises:
            ModuleNotFoundError: the module is not installed.
            EngineError: there is no GPU that it builds for.
        """
        self._trt: Any = importlib.import_module(self.kind.replace("-", "_"))
        self._options = options
        self._log = log
        self._logger = shared_logger(self._trt)
        self._profiles = profiles_from_batches(options.batches)
        self._compute_capabilities = self._target()

    def build(self, onnx_path: Path, plan_path: Path, precision: Precision) -> EngineBuild:
        """Build an engine and write it.

        Args:
            onnx_path: a model that `onnx_from_model` made, in the types of the precision.
            plan_path: file to write.
            precision: `fp32` and `tf32` differ in a flag, `fp16` in the model.

        Returns:
            What the engine was built with.

        Raises:
            EngineError: TensorRT refuses, or the engine computes in other types.
            KeyboardInterrupt: the user interrupted; the builder has stopped.
        """
        model, plugins = self._model_from(onnx_path)
        console = Console(stderr=True)
        with (
            self._log.section(plan_path.name),
            messages_to(self._trt, self._log.write),
            Progress(console=console, transient=True, disable=not console.is_terminal) as bars,
            ThreadPoolExecutor(max_workers=1) as pool,
        ):
            progress = BuildProgress(bars)
            try:
                # In a thread of its own: an interrupt that came up where TensorRT calls back, to
                # log or to show its progress, would be lost there.
                plan = pool.submit(
                    self._plan_from, model, plan_path.name, precision, progress
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
        )

    @abstractmethod
    def _target(self) -> tuple[str, ...]:
        """Compute capabilities that the engines will run on."""

    @abstractmethod
    def _network_flags(self) -> int: ...

    @abstractmethod
    def _prepare(self, config: Any) -> None:
        """Set what only this kind of builder knows."""

    @abstractmethod
    def _layers_of(self, plan: Any) -> list[Layer]:
        """Layers of an engine that was just built."""

    def _model_from(self, onnx_path: Path) -> tuple[bytes, dict[str, str]]:
        """The model as the parser gets it, and versions of the plugins that it needs."""
        return onnx_path.read_bytes(), {}

    def _plan_from(
        self, model: bytes, name: str, precision: Precision, progress: BuildProgress
    ) -> Any:
        """The serialised engine, whose types were checked."""
        builder = self._trt.Builder(self._logger)
        network = builder.create_network(self._network_flags())
        # The network's weights are the parser's.
        parser = self._trt.OnnxParser(network, self._logger)
        if not parser.parse(model):
            raise EngineError(self._refusal(parser, name))
        config = self._config_for(builder, network, precision)
        config.progress_monitor = monitor_into(self._trt, progress)
        plan = self._run(builder, network, config)
        if plan is None:
            raise EngineError(self._failure(name))
        check_precision(self._layers_of(plan), precision, name)
        return plan

    def _config_for(self, builder: Any, network: Any, precision: Precision) -> Any:
        trt = self._trt
        config = builder.create_builder_config()
        # Otherwise an engine does not say in which types its layers compute.
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
        """The serialised engine, or None where the builder failed."""
        return builder.build_serialized_network(network, config)

    def _refusal(self, parser: Any, name: str) -> str:
        """Why the parser does not take the model, in a sentence."""
        error = parser.get_error(0)
        node = " in ".join(
            (f"{error.node_name()} ({error.node_operator()})", *error.local_function_stack()[::-1])
        )
        remedy = f"the build log is {self._log.path}"
        if error.node_operator() == "RoiAlign" and not torch.cuda.is_available():
            remedy = "the operator RoiAlign is only parsed where an NVIDIA GPU is, so export there"
        reason = " ".join(error.desc().split())
        return f"{self.product} cannot build {name} because of node {node}: {reason}; {remedy}"

    def _failure(self, name: str) -> str:
        """Why the builder failed, in a sentence."""
        errors = self._log.errors or ["it gives no reason"]
        shortages = [error for error in errors if _SHORT_OF_MEMORY.search(error)]
        remedy = f"the build log is {self._log.path}"
        if shortages:
            is_limited = self._options.workspace_gib is not None
            more = "give more with --workspace" if is_limited else "free memory of the GPU"
            remedy = f"{more}, or build for smaller batches with --batch"
        return f"{self.product} cannot build {name}: {(shortages or errors)[0]}; {remedy}"


def builder_for(kind: EngineKind, options: EngineOptions, log: BuildLog) -> EngineBuilder:
    """The builder of a kind of engine.

    Raises:
        ModuleNotFoundError: TensorRT or TensorRT-RTX is not installed.
        EngineError: this machine cannot build such engines.
    """
    # Each needs what the other's users may lack.
    if kind == "tensorrt":
        from .tensorrt_builder import TensorRTEngineBuilder

        return TensorRTEngineBuilder(options, log)
    from .rtx_builder import RtxEngineBuilder

    return RtxEngineBuilder(options, log)


def _cuda_version(trt: Any) -> str:
    """Major version of CUDA in the name of the distribution that the bindings came with."""
    bindings = trt.Builder.__module__.partition(".")[0]
    names = metadata.packages_distributions().get(bindings, ())
    found = re.search(r"_cu(\d+)", " ".join(names).replace("-", "_"))
    return found[1] if found else "unknown"
