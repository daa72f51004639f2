"""Peak memory of what is measured."""

import contextlib
import re
import subprocess
from pathlib import Path


def reset_peak_memory() -> None:
    """Start a new measurement of this process's peak; kernels that refuse keep the old one."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mib(device: str) -> float:
    """Memory in MiB that the work since the reset needed, whatever library asked for it.

    On the CPU it is the peak resident memory of this process. On a GPU it is what the whole GPU has
    in use now, contexts and all: torch and ONNX Runtime keep what they needed at their peak.
    """
    if device == "cpu":
        status = Path("/proc/self/status").read_text()
        peak = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
        assert peak is not None
        return int(peak[1]) / 1024
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    answer = subprocess.run(query, capture_output=True, check=True, text=True, timeout=30)
    return float(answer.stdout)
