"""Loader of an engine on the CPU that reports a GPU as its device."""

from typing import Any

from maskrcnn_trt.serving.engines.bundle_engine import BundleLoader


class GpuLoader(BundleLoader):
    def load(self) -> Any:
        engine: Any = super().load()
        engine.info = engine.info._replace(device="cuda")
        return engine
