"""Mask R-CNN from a COCO-format data set to a served model on NVIDIA GPUs."""

import importlib
import os

__version__ = "0.1.0"

# Without this variable, ONNX Runtime looks up its telemetry server and stores a device id in the
# user's cache folder. It reads the variable once, on import, so set it before other imports.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Location `module:attribute` of each public name. The module is imported when the name is first
# used, because `train` needs torch, whose import takes seconds. `__init__.pyi` has the types.
_MODULES = {
    "load_config": "training.config:load_config",
    "train": "training.run:run_training",
    "export_bundle": "export.bundle:bundle_from_checkpoint",
    "Detector": "serving.offline:Detector",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _MODULES[name].partition(":")
    value = getattr(importlib.import_module(f".{module}", __name__), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
