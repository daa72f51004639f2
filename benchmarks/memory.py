"""Peak memory of what is measured."""

import contextlib
import gc
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal

MemoryKind = Literal["cpu", "torch", "driver"]
"""What is counted: resident memory of this process; what torch reserved on the GPU, CUDA's context
not included; or all that is in use on the GPU, contexts included."""


def reset_peak_memory() -> None:
    """Start a new measurement of this process's peaks; kernels that refuse keep the old one."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory_mib(kind: MemoryKind) -> float:
    """Memory in MiB that the work since the reset needed.

    The driver knows no peaks: what is in use now is taken, since libraries that allocate without
    torch keep what they needed.
    """
    if kind == "torch":
        import torch

        return torch.cuda.max_memory_reserved() / 2**20
    if kind == "driver":
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        answer = subprocess.run(query, capture_output=True, check=True, text=True, timeout=30)
        return float(answer.stdout)
    status = Path("/proc/self/status").read_text()
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    assert peak is not None
    return int(peak[1]) / 1024
