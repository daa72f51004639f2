"""Builder of TensorRT engines for this machine's GPU, with our CUDA kernels as plugins."""

import re
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import helper

from ...model.bundle.spec import OPSET_DOMAIN
from ...plugins.runtime.user_cache import cache_folder, write_cached
from ...plugins.tensorrt.plugins import PLUGIN_NAMESPACE, register_plugins
from ..errors import EngineError
from .builder import EngineBuilder
from .inspection import inspected_layers
from .layers import Layer


class TensorRTEngineBuilder(EngineBuilder):
    """Builder of engines for this machine's GPU. It caches kernel timings for the next build."""

    kind = "tensorrt"
    product = "TensorRT"

    def _target(self) -> tuple[str, ...]:
        if not torch.cuda.is_available():
            raise EngineError(
                "TensorRT builds an engine on the GPU that will run it, and this machine has none; "
                "export on that machine, or use --engine tensorrt-rtx, which needs no GPU"
            )
        major, minor = torch.cuda.get_device_capability()
        return (f"{major}.{minor}",)

    def _network_flags(self) -> int:
        flags = self._trt.NetworkDefinitionCreationFlag
        # TensorRT 11 types every network strongly and deprecates the flag.
        is_older = self._trt.__version__.startswith("10.")
        return 1 << int(flags.STRONGLY_TYPED) if is_older else 0

    def _load_model(self, onnx_path: Path) -> tuple[bytes, dict[str, str]]:
        if not self._options.plugins:
            return super()._load_model(onnx_path)
        versions = register_plugins(int(self._compute_capabilities[0].replace(".", "")))
        model, plugins = plugin_graph_from_model(onnx.load(onnx_path))
        return model.SerializeToString(), {name: versions[name] for name in plugins}

    def _prepare(self, config: Any) -> None:
        path = self._timing_cache()
        data = path.read_bytes() if path.is_file() else b""
        timings = config.create_timing_cache(data)
        if timings is None or not config.set_timing_cache(timings, ignore_mismatch=False):
            # The cache is damaged, or of another GPU or version: start an empty one.
            config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)

    def _run(self, builder: Any, network: Any, config: Any) -> Any:
        plan = super()._run(builder, network, config)
        if plan is not None:
            write_cached(self._timing_cache(), bytes(config.get_timing_cache().serialize()))
        return plan

    def _layers_of(self, plan: Any) -> list[Layer]:
        runtime = self._trt.Runtime(self._logger)
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            reason = self._log.errors[0] if self._log.errors else "it gives no reason"
            raise EngineError(f"TensorRT cannot load the engine that it built: {reason}")
        return inspected_layers(self._trt, engine)

    def _timing_cache(self) -> Path:
        """Return the path of the kernel timings: --timing-cache, or one per GPU and version."""
        if self._options.timing_cache is not None:
            return self._options.timing_cache
        gpu = re.sub(r"\W+", "-", torch.cuda.get_device_name())
        return cache_folder("timing") / f"{gpu}-{self._trt.__version__}.cache"


def plugin_graph_from_model(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """Make an ONNX model's custom nodes use our TensorRT plugins, in place.

    Args:
        model: result of `onnx_from_model`; changed in place.

    Returns:
        the model, and the names of the plugins that it uses, as `namespace::name`.
    """
    nodes = [node for node in model.graph.node if node.domain == OPSET_DOMAIN]
    for node in nodes:
        # Without this attribute the parser uses the function body, whatever the parser's flags.
        node.attribute.append(helper.make_attribute("plugin_namespace", PLUGIN_NAMESPACE))
    # Without bodies the parser cannot fall back on one silently.
    del model.functions[:]
    return model, sorted({f"{PLUGIN_NAMESPACE}::{node.op_type}" for node in nodes})
