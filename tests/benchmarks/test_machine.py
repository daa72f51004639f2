import json
import platform
from dataclasses import asdict
from importlib import metadata

from maskrcnn_trt.benchmarks.machine import describe_machine


def test_machine_is_described_in_json():
    machine = json.loads(json.dumps(asdict(describe_machine())))
    assert machine["python"] == platform.python_version()
    assert machine["packages"]["onnxruntime"] == metadata.version("onnxruntime")
    assert machine["cpu"]
    assert machine["cores"] >= 1
