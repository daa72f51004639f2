"""Machine properties to which a configuration is fitted: device, memory and CPU cores."""

import os
from typing import Literal, NamedTuple, cast

import torch

from ...model.host_resources import available_memory
from ..distributed import Worker


class Machine(NamedTuple):
    """Training device, free memory for each training process, and CPU cores."""

    device: Literal["cpu", "cuda"]
    # Free GPU memory in bytes. On a CPU: free memory of the machine in bytes, per process.
    memory: int
    has_bf16: bool
    cores: int
    # Number of training processes.
    processes: int


def common_machine(worker: Worker) -> Machine:
    """Combine the properties of all ranks' machines. Every rank must call this function.

    The result is the same on all ranks: the minimum of free memory and of cores over the ranks, and
    bf16 only if the GPUs of all ranks support it.
    """
    machines = worker.gather(_own_machine(worker))
    common = None
    if worker.is_main:
        common = machines[0]._replace(
            memory=min(machine.memory for machine in machines),
            has_bf16=all(machine.has_bf16 for machine in machines),
            cores=min(machine.cores for machine in machines),
        )
    return cast(Machine, worker.from_main(common))


def _own_machine(worker: Worker) -> Machine:
    cores, processes = len(os.sched_getaffinity(0)), worker.world_size
    if worker.device.type == "cpu":
        return Machine("cpu", available_memory() // processes, False, cores, processes)
    free, _ = torch.cuda.mem_get_info(worker.device)
    return Machine("cuda", free, torch.cuda.is_bf16_supported(), cores, processes)
