"""The choice of an engine's builder."""

from .build_log import BuildLog
from .engine_build import EngineBuilder, EngineKind, EngineOptions


def builder_for(kind: EngineKind, options: EngineOptions, log: BuildLog) -> EngineBuilder:
    """The builder of a kind of engine.

    Raises:
        ModuleNotFoundError: TensorRT or TensorRT-RTX is not installed.
        EngineError: this machine cannot build such engines.
    """
    # Each imports what the other's users may lack.
    if kind == "tensorrt":
        from .tensorrt_builder import TensorRTEngineBuilder

        return TensorRTEngineBuilder(options, log)
    from .rtx_builder import RtxEngineBuilder

    return RtxEngineBuilder(options, log)
