import json
import pkgutil
import subprocess
import sys

import maskrcnn_trt.serving

WITH_EXTRAS = {
    f"maskrcnn_trt.serving.{name}"
    for name in (
        "backends.device",
        "backends.tensorrt",
        "backends.torch",
        "backends.torch_batches",
        "engines.device_engine",
        "steps.device_files",
        "steps.device_marks",
        "steps.device_masks",
        "steps.device_steps",
        "monitoring.opentelemetry_tracing",
        "offline.ray_prediction",
        "offline.stored_images",
    )
}
"""Modules that need more than the base install, and are imported when their backend is chosen."""

MODULES = [
    "maskrcnn_trt.serving",
    "maskrcnn_trt.model.images",
    "maskrcnn_trt.model.masks",
    *(
        module.name
        for module in pkgutil.walk_packages(maskrcnn_trt.serving.__path__, "maskrcnn_trt.serving.")
        if module.name not in WITH_EXTRAS
    ),
]


def test_serving_loads_no_training_stack() -> None:
    program = f"import json, sys, {', '.join(MODULES)}\nprint(json.dumps(list(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    loaded = {name.partition(".")[0] for name in json.loads(result.stdout)}
    assert not loaded & {"torch", "torchvision", "onnx", "onnxscript", "pycocotools"}
