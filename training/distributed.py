"""One process or many: what `torchrun` says of this one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, distributed

from .config import ConfigError

_TIMEOUT = timedelta(hours=1)
"""How long the others may wait while the first rank computes the metrics of a large data set."""


class Worker(NamedTuple):
    """This process among all that train together."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Sum of every rank's values, on each of them."""
        if self.world_size > 1:
            values = values.clone()
            distributed.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order, on the first; nothing on the others."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size if self.is_main else None
        distributed.gather_object(value, values)
        return values or []

    def from_main(self, value: Any) -> Any:
        """The first rank's value, on every rank."""
        if self.world_size == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values)
        return values[0]

    def wait_for_ranks(self) -> None:
        """Go on when every rank has come here."""
        if self.world_size > 1:
            distributed.barrier()


@contextmanager
def worker(device: Literal["auto", "cpu", "cuda"]) -> Iterator[Worker]:
    """Join the processes that `torchrun` started, or be the only one.

    Raises:
        ConfigError: CUDA is asked for and there is none, or fewer devices than processes.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no CUDA device; use device=cpu")
    use_cuda = device != "cpu" and torch.cuda.is_available()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_device = torch.device("cpu")
    if use_cuda:
        _check_device_count()
        local_device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(local_device)
    if world_size == 1:
        yield Worker(0, 1, local_device)
        return
    # Objects and barriers go through gloo on the CPU.
    backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"
    distributed.init_process_group(backend, timeout=_TIMEOUT)
    try:
        yield Worker(distributed.get_rank(), world_size, local_device)
    finally:
        distributed.destroy_process_group()


def _check_device_count() -> None:
    processes, devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if processes > devices:
        raise ConfigError(
            f"torchrun started {processes} processes here, but torch sees only {devices} CUDA "
            f"device{'s' if devices > 1 else ''}; give it --nproc-per-node {devices}, or use "
            "device=cpu"
        )


def is_main_process() -> bool:
    """Whether this process speaks for all that `torchrun` started."""
    return int(os.environ.get("RANK", "0")) == 0
