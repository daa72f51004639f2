import json
import pkgutil
import subprocess
import sys

import pytest

import maskrcnn_trt.serving

WITH_EXTRAS = {
    f"maskrcnn_trt.serving.{name}"
    for name in (
        "backends.pycuda_device",
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


def loaded_by(*modules: str) -> set[str]:
    """Names of the packages that a process has when it has imported modules."""
    program = f"import json, sys, {', '.join(modules)}\nprint(json.dumps(list(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return {name.partition(".")[0] for name in json.loads(result.stdout)}


LIGHT = ["addresses", "config", "client_command", "predict_command", "serve_command"]
"""What the command line loads before it knows what to do."""


@pytest.mark.parametrize("name", LIGHT)
def test_light_modules_load_no_grpc_and_no_pillow(name: str) -> None:
    assert not loaded_by(f"maskrcnn_trt.serving.{name}") & {"grpc", "PIL", "onnxruntime"}


@pytest.mark.parametrize("name", ["engine_worker", "bundle_engine", "host_work"])
def test_engine_processes_load_no_grpc(name: str) -> None:
    assert "grpc" not in loaded_by(f"maskrcnn_trt.serving.engines.{name}")


def test_serving_loads_no_training_stack() -> None:
    stack = {"torch", "torchvision", "onnx", "onnxscript", "pycocotools"}
    assert not loaded_by(*MODULES) & stack
