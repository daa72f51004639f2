"""Hardware and package versions of the machine on which a benchmark runs."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from ...serving.host import gpu_names, installed_versions

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
class MachineInfo:
    """Hardware and package versions of a machine."""

    cpu: str
    # Number of CPU cores that this process may use.
    cores: int
    # Name and driver version of each NVIDIA GPU.
    gpus: tuple[str, ...]
    python: str
    # Versions of the installed packages that affect speed.
    packages: dict[str, str]


def describe_machine() -> MachineInfo:
    """Return hardware and package versions of this machine, without importing the packages."""
    return MachineInfo(
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
