import json
import pkgutil
import subprocess
import sys

import maskrcnn_trt.serving
import pytest

MODULES = [
    "maskrcnn_trt.serving",
    "maskrcnn_trt.model.images",
    "maskrcnn_trt.model.masks",
    *(
        module.name
        for module in pkgutil.walk_packages(maskrcnn_trt.serving.__path__, "maskrcnn_trt.serving.")
    ),
]


@pytest.mark.parametrize("statement", [f"import {', '.join(MODULES)}"])
def test_serving_loads_no_training_stack(statement: str) -> None:
    program = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    loaded = {name.partition(".")[0] for name in json.loads(result.stdout)}
    assert not loaded & {"torch", "torchvision", "onnx", "onnxscript", "pycocotools"}
