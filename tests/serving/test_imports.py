import json
import pkgutil
import subprocess
import sys

import maskrcnn_trt.serving

# Modules that need optional dependencies. They are imported only if their feature is used.
WITH_EXTRAS = {
    f"maskrcnn_trt.serving.{name}"
    for name in (
        "backends.cuda_bindings_driver",
        "backends.pycuda_driver",
        "backends.tensorrt",
        "backends.torch",
        "engines.device_batches",
        "engines.device_steps",
        "http.connection",
        "http.detection",
        "http.endpoint",
        "http.open_inference",
        "http.server",
        "ray_prediction",
    )
}

MODULES = [
    "maskrcnn_trt.serving",
    "maskrcnn_trt.model.image_decoding",
    "maskrcnn_trt.model.masks",
    *(
        module.name
        for module in pkgutil.walk_packages(maskrcnn_trt.serving.__path__, "maskrcnn_trt.serving.")
        if module.name not in WITH_EXTRAS
    ),
]


def loaded_by(*modules: str) -> set[str]:
    """Return the top-level packages in a process that has imported these modules."""
    program = f"import json, sys, {', '.join(modules)}\nprint(json.dumps(list(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return {name.partition(".")[0] for name in json.loads(result.stdout)}


def test_command_line_imports_neither_grpc_nor_pillow() -> None:
    # The modules that the command line imports before it runs a command.
    names = "config", "commands.client", "commands.predict", "commands.serve"
    loaded = loaded_by(*(f"maskrcnn_trt.serving.{name}" for name in names))
    assert not loaded & {"grpc", "PIL", "onnxruntime"}


def test_worker_processes_do_not_import_grpc() -> None:
    # `detections`, `messages` and `result_formats` define the functions that encode detections.
    names = "engines.worker_main", "engines.bundle_engine", "detections", "messages"
    loaded = loaded_by(*(f"maskrcnn_trt.serving.{name}" for name in (*names, "result_formats")))
    assert "grpc" not in loaded


def test_front_ends_import_little() -> None:
    names = "host", "rpc.front_end_process"
    loaded = loaded_by(*(f"maskrcnn_trt.serving.{name}" for name in names))
    assert "grpc" in loaded
    assert not loaded & {"numpy", "PIL", "pydantic", "onnxruntime"}


def test_serving_does_not_import_the_training_stack() -> None:
    stack = {"torch", "torchvision", "onnx", "onnxscript", "pycocotools"}
    assert not loaded_by(*MODULES) & stack
