"""An engine that passes for one on a GPU."""

from maskrcnn_trt.serving.engines import BundleEngine, EngineInfo


class GpuEngine(BundleEngine):
    def load(self) -> EngineInfo:
        return super().load()._replace(device="cuda")
