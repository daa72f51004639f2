"""Properties of the machine that a configuration must fit: device, memory and cores."""

import os
from pathlib import Path
from typing import Literal, NamedTuple

from ..devices import Device

_CGROUP = Path("/sys/fs/cgroup")


class Machine(NamedTuple):
    """Training device, free memory of this device per process, and CPU cores."""

    device: Literal["cpu", "cuda"]
    # Free memory in bytes of the GPU. On a CPU: free memory of the machine divided by `processes`.
    memory: int
    has_bf16: bool
    cores: int
    # Number of training processes.
    processes: int


def this_machine(device: Device) -> Machine:
    """Return the properties of this machine, for the value of the configuration key `device`.

    Raises:
        ConfigError: A GPU in `device` does not exist, or there are more processes than GPUs.
    """
    import torch

    from ..distributed import local_device

    cores, processes = len(os.sched_getaffinity(0)), int(os.environ.get("WORLD_SIZE", "1"))
    own = local_device(device)
    if own.type == "cpu":
        return Machine("cpu", _free_memory() // processes, False, cores, processes)
    free, _ = torch.cuda.mem_get_info(own)
    return Machine("cuda", free, torch.cuda.is_bf16_supported(), cores, processes)


def _free_memory() -> int:
    """Return the free host memory in bytes, within the limit of the cgroup."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return min(free, int(limit) - used) if limit.isdigit() else free
