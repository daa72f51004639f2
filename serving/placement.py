"""Where engines compute: which GPU or which cores each of several gets."""

import os
import subprocess
import sys
from collections.abc import Mapping, Set
from typing import NamedTuple

_CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

# CUDA's own count, which knows of MIG, containers and the environment. It is taken in a process of
# its own, since a process that has loaded CUDA keeps hold of every GPU.
_COUNT = """
import ctypes
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    print(0)
else:
    count = ctypes.c_int()
    cuda.cuInit(0)
    cuda.cuDeviceGetCount(ctypes.byref(count))
    print(count.value)
"""


class Place(NamedTuple):
    """What an engine may use."""

    environment: Mapping[str, str]
    """Variables that tell libraries so."""
    cores: Set[int]
    """CPUs, by number."""
    is_for_gpu: bool = False
    """Whether there is a place only because there are several GPUs."""


def places_for(workers: int | None) -> list[Place]:
    """A place for each of so many engines; none, one a GPU, or one where there is no GPU."""
    cores = sorted(os.sched_getaffinity(0))
    gpus = visible_gpus()
    if gpus:
        # Their threads do little, and go wherever a core is free.
        return [
            Place(
                {_CUDA_VISIBLE_DEVICES: gpus[index % len(gpus)]},
                frozenset(cores),
                is_for_gpu=workers is None and index > 0,
            )
            for index in range(workers or len(gpus))
        ]
    count = workers or 1
    return [Place({}, frozenset(cores[index % len(cores) :: count])) for index in range(count)]


def visible_gpus() -> list[str]:
    """The GPUs that CUDA finds, as its environment variable names them."""
    command = [sys.executable, "-I", "-S", "-c", _COUNT]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    count = int(found.stdout or 0)
    names = os.environ.get(_CUDA_VISIBLE_DEVICES)
    return names.split(",")[:count] if names else [str(index) for index in range(count)]
