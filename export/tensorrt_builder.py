"""Engines of TensorRT: for the GPU they are built on, with our CUDA kernels as plugins."""

import re
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import helper

from ..model.spec import OPSET_DOMAIN
from ..plugins.tensorrt_plugins import PLUGIN_NAMESPACE, register_plugins
from ..plugins.user_cache import cache_folder, store
from .engine_build import EngineBuilder
from .engine_inspection import inspected_layers
from .engine_layers import Layer
from .errors import EngineError


class TensorRTEngineBuilder(EngineBuilder):
    """Builds for the GPU of this machine, and keeps what TensorRT measures on it for next time."""

    kind = "tensorrt"
    product = "TensorRT"

    def _target(self) -> tuple[str, ...]:
        if not torch.cuda.is_available():
            raise EngineError(
                "TensorRT builds an engine on the GPU that is to run it, and there is none here; "
                "export on that machine, or give --engine tensorrt-rtx, which needs no GPU"
            )
        major, minor = torch.cuda.get_device_capability()
        return (f"{major}.{minor}",)

    def _network_flags(self) -> int:
        flags = self._trt.NetworkDefinitionCreationFlag
        # From 11 on every network is strongly typed, and the flag deprecated.
        is_older = self._trt.__version__.startswith("10.")
        return 1 << int(flags.STRONGLY_TYPED) if is_older else 0

    def _model_from(self, onnx_path: Path) -> tuple[bytes, dict[str, str]]:
        if not self._options.plugins:
            return super()._model_from(onnx_path)
        versions = register_plugins(int(self._compute_capabilities[0].replace(".", "")))
        model, plugins = plugin_graph_from_model(onnx.load(onnx_path))
        return model.SerializeToString(), {name: versions[name] for name in plugins}

    def _prepare(self, config: Any) -> None:
        path = self._timing_cache()
        data = path.read_bytes() if path.is_file() else b""
        timings = config.create_timing_cache(data)
        if timings is None or not config.set_timing_cache(timings, ignore_mismatch=False):
            # Of another GPU or version, or damaged: measured anew, it is replaced.
            config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)

    def _run(self, builder: Any, network: Any, config: Any) -> Any:
        plan = super()._run(builder, network, config)
        if plan is not None:
            store(self._timing_cache(), bytes(config.get_timing_cache().serialize()))
        return plan

    def _layers_of(self, plan: Any) -> list[Layer]:
        runtime = self._trt.Runtime(self._logger)
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            reason = self._log.errors[0] if self._log.errors else "it gives no reason"
            raise EngineError(f"TensorRT cannot load the engine that it has built: {reason}")
        return inspected_layers(self._trt, engine)

    def _timing_cache(self) -> Path:
        """The file that was asked for, or one for this GPU and version in the user's cache."""
        if self._options.timing_cache is not None:
            return self._options.timing_cache
        gpu = re.sub(r"\W+", "-", torch.cuda.get_device_name())
        return cache_folder("timing") / f"{gpu}-{self._trt.__version__}.cache"


def plugin_graph_from_model(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """Point a model's custom nodes at the plugins.

    The parser takes a function body, whatever its flags, unless the node names the plugin's
    namespace; and without bodies it cannot fall back on one unnoticed.

    Args:
        model: as `onnx_from_model` makes it; changed in place.

    Returns:
        the model, and the plugins that it needs, as `namespace::name`.
    """
    nodes = [node for node in model.graph.node if node.domain == OPSET_DOMAIN]
    for node in nodes:
        node.attribute.append(helper.make_attribute("plugin_namespace", PLUGIN_NAMESPACE))
    del model.functions[:]
    return model, sorted({f"{PLUGIN_NAMESPACE}::{node.op_type}" for node in nodes})
