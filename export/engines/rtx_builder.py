"""Builder of TensorRT-RTX engines for several types of GPU. The build needs no GPU."""

from typing import Any

from ..errors import EngineError
from .builder import EngineBuilder
from .layers import Layer, layers_from_listing


class RtxEngineBuilder(EngineBuilder):
    """Builder of TensorRT-RTX engines for a set of compute capabilities.

    TensorRT-RTX does not support plugins. Its engines run the function bodies of the ONNX file's
    custom nodes instead.
    """

    kind = "tensorrt-rtx"
    product = "TensorRT-RTX"

    def _target(self) -> tuple[str, ...]:
        # Turing (7.5) lacks the fp32 matrix product that the function body of NMS uses.
        # A build for Turing must not even begin. After it fails, the next engine that this process
        # builds, for any GPU, computes convolutions in fp32 instead of int8 (TensorRT-RTX 1.7).
        available = tuple(c for c in self._members() if c != "7.5")
        chosen = self._options.compute_capabilities or available
        unknown = [c for c in chosen if c not in available]
        if unknown:
            raise EngineError(
                f"{self.product} {self._trt.__version__} builds for the compute capabilities "
                f"{', '.join(available)}, not {', '.join(unknown)}; choose others with "
                "--compute-capability, or export with --engine tensorrt on a machine with a GPU of "
                f"compute capability {unknown[0]}"
            )
        return tuple(dict.fromkeys(chosen))

    def _network_flags(self) -> int:
        return 1 << int(self._trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)

    def _prepare(self, config: Any) -> None:
        members = self._members()
        config.num_compute_capabilities = len(self._compute_capabilities)
        for index, capability in enumerate(self._compute_capabilities):
            config.set_compute_capability(members[capability], index)

    def _layers_of(self, plan: Any, model: bytes) -> list[Layer]:
        # Read the builder's log, because loading an engine to inspect it needs a GPU.
        return layers_from_listing(self._log.listing)

    def _members(self) -> dict[str, Any]:
        """Return the members of `trt.ComputeCapability`, with keys such as `12.0` for `SM120`."""
        return {
            f"{name[2:-1]}.{name[-1]}": member
            for name, member in self._trt.ComputeCapability.__members__.items()
            if name.startswith("SM")
        }
