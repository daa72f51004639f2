"""Builder of TensorRT engines for this machine's GPU, with our CUDA kernels as plugins."""

import re
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

from ... import __version__
from ...plugins.runtime.compilation import nvrtc_cuda_version
from ...plugins.runtime.user_cache import cache_folder, write_cached
from ...plugins.tensorrt.plugins import (
    kernels_digest,
    plugin_errors,
    plugin_ptx_version,
    register_plugins,
)
from ..errors import EngineError
from .builder import EngineBuilder
from .engine_graph import load_model, plugin_graph_from_model
from .inspection import inspected_layers
from .layers import Layer
from .refit import refit_engine


class TensorRTEngineBuilder(EngineBuilder):
    """Builder of TensorRT engines for this machine's GPU, with a timing cache for later builds."""

    kind = "tensorrt"
    product = "TensorRT"

    def _target(self) -> tuple[str, ...]:
        if not torch.cuda.is_available():
            raise EngineError(
                "TensorRT builds an engine on the GPU that will run it, but this machine has no "
                "GPU; export on the machine that will run the engine, or use --engine "
                "tensorrt-rtx, which needs no GPU"
            )
        # Remember the current GPU. `build` runs TensorRT in a new thread, where another GPU may be
        # current.
        self._gpu = torch.cuda.current_device()
        major, minor = torch.cuda.get_device_capability(self._gpu)
        return (f"{major}.{minor}",)

    def _build_plan(self, *arguments: Any) -> Any:
        with torch.cuda.device(self._gpu):
            return super()._build_plan(*arguments)

    @property
    def _architecture(self) -> int:
        """Lowest compute capability on which the plugins must run, as an integer: 80 for 8.0."""
        if self._options.hardware_compatibility == "ampere-plus":
            return 80
        return int(self._compute_capabilities[0].replace(".", ""))

    def _requirements(self, has_plugins: bool) -> dict[str, Any]:
        ptx = {
            "ptx_version": plugin_ptx_version(self._architecture),
            "ptx_cuda_version": nvrtc_cuda_version(),
        }
        return {
            "gpu_name": torch.cuda.get_device_name(self._gpu),
            "hardware_compatibility": self._options.hardware_compatibility,
            "version_compatible": self._options.version_compatible,
            "stripped": self._options.strip_weights,
            **(ptx if has_plugins else {}),
        }

    def _network_flags(self) -> int:
        flags = self._trt.NetworkDefinitionCreationFlag
        # In TensorRT 11, every network is strongly typed, and the flag is deprecated.
        is_older = self._trt.__version__.startswith("10.")
        return 1 << int(flags.STRONGLY_TYPED) if is_older else 0

    def _load_model(self, onnx_path: Path) -> tuple[bytes, dict[str, str]]:
        if not self._options.plugins:
            return super()._load_model(onnx_path)
        _, driver_version = driver.cuDriverGetVersion()
        check_ptx(nvrtc_cuda_version(), driver_version)
        versions = register_plugins(self._architecture)
        model, plugins = plugin_graph_from_model(load_model(onnx_path))
        return model.SerializeToString(), {name: versions[name] for name in plugins}

    def _prepare(self, config: Any) -> None:
        self._set_options(config)
        path = self._timing_cache()
        data = path.read_bytes() if path.is_file() else b""
        timings = config.create_timing_cache(data)
        if timings is None or not config.set_timing_cache(timings, ignore_mismatch=False):
            # The cache is damaged, or belongs to another GPU or version. Start an empty one.
            config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)

    def _set_options(self, config: Any) -> None:
        trt, options = self._trt, self._options
        if options.optimization_level is not None:
            config.builder_optimization_level = options.optimization_level
        if options.aux_streams is not None:
            config.max_aux_streams = options.aux_streams
        if options.tiling != "none":
            levels = trt.TilingOptimizationLevel.__members__
            config.tiling_optimization_level = levels[options.tiling.upper()]
        if options.hardware_compatibility != "none":
            name = options.hardware_compatibility.upper().replace("-", "_")
            config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.__members__[name]
        if options.version_compatible:
            config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        if options.strip_weights:
            config.set_flag(trt.BuilderFlag.STRIP_PLAN)

    def _callback_errors(self) -> list[str]:
        return plugin_errors()

    def _run(self, builder: Any, network: Any, config: Any) -> Any:
        plan = super()._run(builder, network, config)
        if plan is not None:
            write_cached(self._timing_cache(), bytes(config.get_timing_cache().serialize()))
        return plan

    def _layers_of(self, plan: Any, model: bytes) -> list[Layer]:
        runtime = self._trt.Runtime(self._logger)
        runtime.engine_host_code_allowed = self._options.version_compatible
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            reason = self._log.errors[0] if self._log.errors else "it gives no reason"
            raise EngineError(f"TensorRT cannot load the engine that it built: {reason}")
        if self._options.strip_weights:  # without weights, no context can be created
            refit_engine(self._trt, engine, model)
        return inspected_layers(self._trt, engine)

    def _timing_cache(self) -> Path:
        """Return the path of the file that caches kernel timings.

        Without the option `timing_cache`, the file is in the user's cache folder. Its name contains
        the GPU's name, the versions of TensorRT and of this package, and a digest of the plugins'
        kernels.
        """
        if self._options.timing_cache is not None:
            return self._options.timing_cache
        gpu = re.sub(r"\W+", "-", torch.cuda.get_device_name(self._gpu))
        # TensorRT's cache keys contain neither attributes nor code of plugins. The file name
        # contains a digest of the code, so that timings of changed plugins are not used.
        kernels = kernels_digest(self._architecture)
        name = f"{gpu}-{self._trt.__version__}-{__version__}-{kernels}.cache"
        return cache_folder("timing") / name


def check_ptx(nvrtc_version: int, driver_version: int) -> None:
    """Check that a CUDA driver accepts the PTX code from a version of NVRTC.

    Both arguments are CUDA versions as integers, such as 13000 for 13.0.

    Raises:
        EngineError: NVRTC is newer than the driver.
    """
    if nvrtc_version > driver_version:
        nvrtc, here = (f"{v // 1000}.{v % 1000 // 10}" for v in (nvrtc_version, driver_version))
        after = f"{driver_version // 1000}.{driver_version % 1000 // 10 + 1}"
        raise EngineError(
            f"NVRTC of CUDA {nvrtc} generates PTX that this machine's driver for CUDA {here} "
            f'rejects; run pip install "nvidia-cuda-nvrtc<{after}", update the driver, or use '
            "--no-plugins"
        )
