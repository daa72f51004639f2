"""An engine that passes for one on a GPU."""

from maskrcnn_trt.serving.engines.base import EngineInfo
from maskrcnn_trt.serving.engines.bundle_engine import BundleEngine


class GpuEngine(BundleEngine):
    def load(self) -> EngineInfo:
        return super().load()._replace(device="cuda")
