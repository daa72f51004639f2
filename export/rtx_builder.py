"""Engines of TensorRT-RTX: portable over GPUs, and built without one."""

from typing import Any

from .engine_build import EngineBuilder
from .engine_layers import Layer, layers_from_listing
from .errors import EngineError


class RtxEngineBuilder(EngineBuilder):
    """Builds for the GPUs named.

    TensorRT-RTX has no plugins: its engines hold the function bodies of the ONNX file.
    """

    kind = "tensorrt-rtx"
    product = "TensorRT-RTX"

    def _target(self) -> tuple[str, ...]:
        offered = tuple(self._members())
        # Turing has no matrix product in fp32, which the body of suppression is made of.
        chosen = self._options.compute_capabilities or tuple(c for c in offered if c != "7.5")
        unknown = [c for c in chosen if c not in offered]
        if unknown:
            raise EngineError(
                f"{self.product} {self._trt.__version__} builds for the compute capabilities "
                f"{', '.join(offered)}, not {', '.join(unknown)}; give others with "
                "--compute-capability, or build for that GPU with --engine tensorrt"
            )
        return tuple(dict.fromkeys(chosen))

    def _network_flags(self) -> int:
        return 1 << int(self._trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)

    def _prepare(self, config: Any) -> None:
        members = self._members()
        config.num_compute_capabilities = len(self._compute_capabilities)
        for index, capability in enumerate(self._compute_capabilities):
            config.set_compute_capability(members[capability], index)

    def _layers_of(self, plan: Any) -> list[Layer]:
        # Without a GPU no engine can be loaded, and so none inspected.
        return layers_from_listing(self._log.listing)

    def _members(self) -> dict[str, Any]:
        """Members of the enumeration by compute capability: `SM120` is `12.0`."""
        return {
            f"{name[2:-1]}.{name[-1]}": member
            for name, member in self._trt.ComputeCapability.__members__.items()
            if name.startswith("SM")
        }
