"""Process group, ranks and devices of distributed training under `torchrun`."""

import atexit
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

from ..model.host_resources import keep_freed_memory
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
        total = RankSum(self.world_size)
        total.start(values)
        return total.result()

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

    def broadcast(self, values: Tensor) -> None:
        """Broadcast: replace the values of a tensor by those of rank 0."""
        if self.world_size > 1:
            distributed.broadcast(values, src=0)

    def wait_for_ranks(self) -> None:
        """Barrier: wait until all ranks have called this method."""
        if self.world_size > 1:
            distributed.barrier()


class RankSum:
    """Asynchronous all-reduce of one tensor per training step."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._sum: Tensor | None = None
        self._operation: distributed.Work | None = None

    def start(self, values: Tensor) -> None:
        """Start to sum a tensor elementwise over all ranks. Do not wait.

        If a sum has been started in this step, do nothing.
        """
        if self._sum is not None:
            return
        # Copy the tensor, because the next replay of a CUDA graph may overwrite it.
        self._sum = values.clone()
        if self._world_size > 1:
            self._operation = distributed.all_reduce(self._sum, async_op=True)

    def result(self) -> Tensor:
        """Wait for the sum that `start` began, and return it.

        For tensors on a GPU, only the current CUDA stream waits, not the host.
        """
        total, operation = self._sum, self._operation
        assert total is not None
        self._sum = self._operation = None
        if operation is not None:
            operation.wait()
        return total


class GradientSum:
    """All-reduce that replaces the gradients of a training step by their sums over all ranks.

    The gradients are summed in groups. All ranks sum the groups in the same order.
    """

    def __init__(self, groups: Iterable[Iterable[Tensor]]) -> None:
        """Prepare to sum the gradients of `groups` of parameters, in the order of the groups."""
        self._groups = [list(group) for group in groups]
        self._started = 0
        self._operations: list[Any] = []

    def start(self) -> None:
        """Start to sum the gradients of the next group of parameters over all ranks. Do not wait.

        Call this as soon as the backward pass has computed these gradients. The backward pass can
        continue during the sum.
        """
        group = self._groups[self._started]
        assert all(x.grad is not None for x in group if x.requires_grad)
        self._start_next()

    def finish(self) -> None:
        """Sum the gradients of the remaining groups of parameters, and wait for all sums.

        Call this after the backward pass.
        """
        while self._started < len(self._groups):
            self._start_next()
        for operation in self._operations:
            operation.wait()
        self._started, self._operations = 0, []

    def _start_next(self) -> None:
        gradients = [x.grad for x in self._groups[self._started] if x.grad is not None]
        self._started += 1
        if not gradients:
            return
        with distributed._coalescing_manager(async_ops=True) as operation:  # type: ignore[attr-defined]
            for gradient in gradients:
                distributed.all_reduce(gradient)
        self._operations.append(operation)


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
    else:
        keep_freed_memory()
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
