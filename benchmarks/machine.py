"""What a benchmark ran on."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from ..serving.host import gpu_names, installed_versions

_PACKAGES = (
    "maskrcnn-trt",
    "numpy",
    "nvidia-cuda-nvrtc",
    "nvidia-cudnn-cu13",
    "onnxruntime",
    "onnxruntime-gpu",
    "pycocotools",
    "torch",
    "torchvision",
    "triton",
)


@dataclass(frozen=True)
class Machine:
    """Hardware and versions that a result holds for."""

    cpu: str
    cores: int
    """Cores that this process may use."""
    gpus: tuple[str, ...]
    """Name and driver of each NVIDIA GPU."""
    python: str
    packages: dict[str, str]
    """Versions of the installed packages that matter."""


def describe_machine() -> Machine:
    """Hardware and versions here; nothing heavy is imported to find out."""
    return Machine(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        gpus=gpu_names(),
        python=platform.python_version(),
        packages=installed_versions(_PACKAGES),
    )


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
