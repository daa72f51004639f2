"""Process group, ranks and devices of distributed training under `torchrun`."""

import atexit
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from .config import ConfigError
from .devices import Device

# Timeout of collective operations. It is long, because the other ranks wait in such an operation
# while rank 0 computes metrics.
_TIMEOUT = timedelta(minutes=30)


class RankLostError(Exception):
    """Another training process ended, or does not answer."""


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
        return self.start_sum(values).result()

    def start_sum(self, values: Tensor) -> "RankSum":
        """Start an all-reduce of a copy of a tensor. Do not wait for the result."""
        if self.world_size == 1:
            return RankSum(values, None)
        values = values.clone()
        return RankSum(values, distributed.all_reduce(values, async_op=True))

    def gather(self, value: Any) -> list[Any]:
        """Gather: return all ranks' values in rank order on rank 0, and `[]` on the other ranks."""
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


class RankSum:
    """All-reduce in progress: an elementwise sum of a tensor over all ranks."""

    def __init__(self, values: Tensor, operation: distributed.Work | None) -> None:
        self._values, self._operation = values, operation

    def result(self) -> Tensor:
        """Wait for the operation, and return the sum. On a GPU, only the current stream waits."""
        if self._operation is not None:
            self._operation.wait()
        return self._values


class GradientSum:
    """All-reduce that replaces the gradients of a training step by their sums over all ranks."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._remaining = self._parameters
        self._operations: list[Any] = []

    def start(self) -> None:
        """Start to sum the gradients that the backward pass has computed so far. Do not wait.

        The backward pass can continue during the sum. When the ranks call this method, all of them
        must have computed the gradients of the same parameters.
        """
        ready = [x.grad for x in self._remaining if x.grad is not None]
        self._remaining = [x for x in self._remaining if x.grad is None]
        if not ready:
            return
        with distributed._coalescing_manager(async_ops=True) as operation:  # type: ignore[attr-defined]
            for gradient in ready:
                distributed.all_reduce(gradient)
        self._operations.append(operation)

    def finish(self) -> None:
        """Sum the remaining gradients, and wait for all sums. Call this after the backward pass."""
        self.start()
        for operation in self._operations:
            operation.wait()
        self._remaining, self._operations = self._parameters, []


def local_device(device: Device) -> torch.device:
    """Return the device of this process: the CPU, or one GPU.

    The environment variable `LOCAL_RANK` selects the GPU. If `device` lists GPU indices,
    `LOCAL_RANK` is a position in this list. Otherwise, `LOCAL_RANK` is the index of the GPU.

    Raises:
        ConfigError: `device` requires a GPU that does not exist, or there are more processes on
            this machine than GPUs to use.
    """
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    numbers = device if isinstance(device, tuple) else range(count)
    if not count or max(numbers) >= count:
        name = device if isinstance(device, str) else ",".join(map(str, device))
        raise ConfigError(
            f"device={name}, but the number of GPUs that torch sees is {count}; use device=cpu"
            + (f" or numbers below {count}" if count else "")
        )
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if processes > len(numbers):
        raise ConfigError(
            f"there are {processes} training processes on this machine, but the number of GPUs is "
            f"{len(numbers)}; use processes={len(numbers)} (torchrun: --nproc-per-node "
            f"{len(numbers)}) or device=cpu"
        )
    return torch.device("cuda", numbers[int(os.environ.get("LOCAL_RANK", "0"))])


@contextmanager
def worker(device: Device) -> Iterator[Worker]:
    """Join the process group of `torchrun` for a `with` block, and yield this process's `Worker`.

    Without `torchrun`, this process is the only rank.

    Raises:
        ConfigError: `device` requires a GPU that does not exist, or there are more processes on
            this machine than GPUs to use.
        RankLostError: In the block, another rank ended while this rank waited for it, or did not
            answer for 30 minutes.
    """
    own = local_device(device)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if own.type == "cuda":
        torch.cuda.set_device(own)
    if world_size == 1:
        yield Worker(0, 1, own)
        return
    # Gloo, on the CPU, serves barriers and the transfer of Python objects. NCCL serves GPU tensors.
    backend = "cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo"
    distributed.init_process_group(backend, timeout=_TIMEOUT)
    rank = distributed.get_rank()
    try:
        yield Worker(rank, world_size, own)
    except RuntimeError as error:
        # Gloo has no exception type of its own, so its errors are recognised by their text.
        if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
            raise
        raise RankLostError(
            f"rank {rank} lost the connection to another training process, whose output says why; "
            "continue from the last checkpoint with --resume"
        ) from error
    finally:
        # Keep a reference to the group until the process exits. Otherwise, the destructor of
        # DistributedDataParallel's reducer may join Gloo's threads. torch runs this destructor with
        # the GIL held. If one of the threads waits for the GIL, both wait forever
        # (pytorch/pytorch#56297).
        ended = [distributed.group.WORLD]
        atexit.register(ended.clear)
        distributed.destroy_process_group()


def is_main_process() -> bool:
    """Whether this process is rank 0. Reads the environment variable `RANK`."""
    return int(os.environ.get("RANK", "0")) == 0
