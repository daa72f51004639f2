"""Properties of the machine that a configuration must fit: device, memory and cores."""

import os
from typing import Literal, NamedTuple

from ...model.host_resources import available_memory
from ..devices import Device


class Machine(NamedTuple):
    """Training device, free memory for each training process, and CPU cores."""

    device: Literal["cpu", "cuda"]
    # Free memory in bytes of the GPU. On a CPU: free memory of the machine divided by `processes`.
    memory: int
    has_bf16: bool
    cores: int
    # Number of training processes.
    processes: int


def this_machine(device: Device) -> Machine:
    """Return the properties of this machine for a value of the configuration key `device`.

    Raises:
        ConfigError: `device` requires a GPU that does not exist, or there are more processes on
            this machine than GPUs to use.
    """
    import torch

    from ..distributed import local_device

    cores, processes = len(os.sched_getaffinity(0)), int(os.environ.get("WORLD_SIZE", "1"))
    own = local_device(device)
    if own.type == "cpu":
        return Machine("cpu", available_memory() // processes, False, cores, processes)
    free, _ = torch.cuda.mem_get_info(own)
    return Machine("cuda", free, torch.cuda.is_bf16_supported(), cores, processes)
