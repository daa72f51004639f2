"""Process group, ranks and devices of distributed training under `torchrun`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, distributed

from .config import ConfigError

# Timeout of collective operations: long, because ranks wait in one while rank 0 computes metrics.
_TIMEOUT = timedelta(hours=1)


class Worker(NamedTuple):
    """Rank and device of this process, with the collective operations that training needs."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, which writes all files."""
        return self.rank == 0

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """All-reduce: return the elementwise sum of a tensor over all ranks."""
        if self.world_size > 1:
            values = values.clone()
            distributed.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Gather: return every rank's value, by rank, on rank 0, and `[]` on the other ranks."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size if self.is_main else None
        distributed.gather_object(value, values)
        return values or []

    def from_main(self, value: Any) -> Any:
        """Broadcast: return the value of rank 0 on all ranks."""
        if self.world_size == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values)
        return values[0]

    def wait_for_ranks(self) -> None:
        """Barrier: wait until all ranks have called this method."""
        if self.world_size > 1:
            distributed.barrier()


@contextmanager
def worker(device: Literal["auto", "cpu", "cuda"]) -> Iterator[Worker]:
    """Join the process group of `torchrun`. Without `torchrun`, this process is the only rank.

    Raises:
        ConfigError: `device` is "cuda" and there is no GPU, or `torchrun` started more processes
            than there are GPUs.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no GPU; use device=cpu")
    use_cuda = device != "cpu" and torch.cuda.is_available()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_device = torch.device("cpu")
    if use_cuda:
        processes, devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if processes > devices:
            raise ConfigError(
                f"torchrun started {processes} processes on this machine, but the number of GPUs "
                f"is {devices}; use --nproc-per-node {devices} or device=cpu"
            )
        local_device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(local_device)
    if world_size == 1:
        yield Worker(0, 1, local_device)
        return
    # Gloo serves barriers and the transfer of Python objects on the CPU, NCCL that of GPU tensors.
    backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"
    distributed.init_process_group(backend, timeout=_TIMEOUT)
    try:
        yield Worker(distributed.get_rank(), world_size, local_device)
    finally:
        distributed.destroy_process_group()


def is_main_process() -> bool:
    """Whether this process is rank 0 (from `RANK`, so also without a process group)."""
    return int(os.environ.get("RANK", "0")) == 0
