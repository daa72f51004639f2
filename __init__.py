"""Mask R-CNN from a COCO-format data set to a served model on NVIDIA GPUs."""

import os

__version__ = "0.1.0"

# Without this, ONNX Runtime looks up its telemetry server and stores a device id in the user's
# cache folder. It reads the variable once, when it is imported, so it is set before anything else.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
