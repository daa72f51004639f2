"""No process of the package leaves telemetry files of ONNX Runtime in the user's home."""

import os
import subprocess
import sys
from pathlib import Path


def test_onnxruntime_stores_nothing_in_a_fresh_home(bundle: Path, tmp_path: Path) -> None:
    model = next(bundle.glob("*.onnx"))
    script = f"""
import maskrcnn_trt, onnxruntime
onnxruntime.InferenceSession({str(model)!r}, providers=["CPUExecutionProvider"])
"""
    environment = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
    environment |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, env=environment)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
