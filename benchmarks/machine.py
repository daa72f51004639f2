"""What a benchmark ran on."""

import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

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
        gpus=_gpu_names(),
        python=platform.python_version(),
        packages=dict(_installed(_PACKAGES)),
    )


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _gpu_names() -> tuple[str, ...]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, check=True, text=True, timeout=30)
    except (FileNotFoundError, subprocess.SubprocessError):
        return ()
    names = (line.rsplit(", ", 1) for line in answer.stdout.splitlines())
    return tuple(f"{name} (driver {driver})" for name, driver in names)


def _installed(packages: Iterable[str]) -> Iterable[tuple[str, str]]:
    for package in packages:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
