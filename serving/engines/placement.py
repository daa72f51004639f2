"""Where engines compute: which GPU or which cores each of several gets."""

import os
import subprocess
import sys
from collections.abc import Mapping, Set
from typing import NamedTuple

from ..errors import BackendError

_CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_TIMEOUT_S = 60.0
"""For CUDA to start."""

# CUDA itself, which knows of MIG, containers and the environment. It is asked in a process of its
# own, since a process that has loaded CUDA keeps hold of every GPU.
_BUS_IDS = """
import ctypes
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    raise SystemExit
count, gpu, bus_id = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(32)
cuda.cuInit(0)
cuda.cuDeviceGetCount(ctypes.byref(count))
for index in range(count.value):
    cuda.cuDeviceGet(ctypes.byref(gpu), index)
    cuda.cuDeviceGetPCIBusId(bus_id, len(bus_id), gpu)
    print(bus_id.value.decode())
"""


class Place(NamedTuple):
    """What an engine may use."""

    environment: Mapping[str, str]
    """Variables that tell libraries so."""
    cores: Set[int]
    """CPUs, by number."""
    gpu: int | None = None
    """The number that CUDA has for its GPU in the server's process; none where there is no GPU."""
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
                gpu=index % len(gpus),
                is_for_gpu=workers is None and index > 0,
            )
            for index in range(workers or len(gpus))
        ]
    count = workers or 1
    return [Place({}, frozenset(cores[index % len(cores) :: count])) for index in range(count)]


def visible_gpus() -> list[str]:
    """The GPUs that CUDA finds, as its environment variable names them."""
    count = len(gpu_bus_ids())
    names = os.environ.get(_CUDA_VISIBLE_DEVICES)
    return names.split(",")[:count] if names else [str(index) for index in range(count)]


def gpu_bus_ids() -> list[str]:
    """PCI bus ID of each GPU that CUDA finds; the parts of one that is divided by MIG share its.

    Raises:
        BackendError: the driver does not answer.
    """
    command = [sys.executable, "-I", "-S", "-c", _BUS_IDS]
    try:
        found = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise BackendError(
            f"CUDA does not say within {_TIMEOUT_S:g} s which GPUs there are; see whether "
            "nvidia-smi does, and restart what hangs"
        ) from None
    return found.stdout.splitlines()
