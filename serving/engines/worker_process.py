"""Worker processes, which run one engine each. `pipeline.batching` restarts failed ones."""

import contextlib
import errno
import logging
import os
import queue
from collections.abc import Iterable, Mapping, Sequence, Set
from multiprocessing import Pipe
from typing import Any, Generic, NamedTuple, Self, TypeVar

from ..errors import BackendDownError, BackendError
from ..host import CUDA_VISIBLE_DEVICES, ChildProcess, visible_gpus
from .base import EngineInfo, EngineLoader
from .worker_main import Channel, run_worker

Item = TypeVar("Item")
Result = TypeVar("Result")

_log = logging.getLogger(__name__)

# Time limit in seconds for each wait in `WorkerProcess.close`. If a wait exceeds the limit, the
# process is killed.
_CLOSE_TIMEOUT_S = 10.0


class WorkerResources(NamedTuple):
    """CPU cores and GPU that a worker process may use."""

    # Environment variables that select the GPU.
    environment: Mapping[str, str]
    # Indices of the CPU cores.
    cores: Set[int]
    # Index of the GPU among the GPUs that the server's process sees. None: there is no GPU.
    gpu: int | None = None
    # Whether the worker exists only because the machine has several GPUs.
    is_for_gpu: bool = False


def assign_resources(workers: int | None) -> list[WorkerResources]:
    """Return the resources of each worker process.

    The GPUs are assigned to the workers in round-robin order, one GPU per worker, and all workers
    share all CPU cores. Without GPUs, the CPU cores are divided among the workers.

    Args:
        workers: Number of worker processes. None: one per GPU, or one if the machine has no GPU.

    Raises:
        BackendError: the GPU driver does not respond.
    """
    cores = sorted(os.sched_getaffinity(0))
    gpus = visible_gpus()
    if gpus:
        # Workers on a GPU use little CPU time, so they share all cores.
        return [
            WorkerResources(
                {CUDA_VISIBLE_DEVICES: gpus[index % len(gpus)]},
                frozenset(cores),
                gpu=index % len(gpus),
                is_for_gpu=workers is None and index > 0,
            )
            for index in range(workers or len(gpus))
        ]
    count = workers or 1
    shares = [frozenset(cores[index % len(cores) :: count]) for index in range(count)]
    return [WorkerResources({}, share) for share in shares]


class WorkerProcess(Generic[Item, Result]):
    """Handle of a worker process, a child process that runs one engine and computes batches."""

    def __init__(
        self,
        loader: EngineLoader[Item, Result],
        resources: WorkerResources,
        hang_timeout_s: float,
    ) -> None:
        """Start the worker process, which then loads its engine.

        Args:
            loader: Loader of the engine.
            resources: CPU cores and GPU of the process.
            hang_timeout_s: Time limit of a batch in seconds. If it is exceeded, the process is
                killed.
        """
        self.loader = loader
        self.resources = resources
        self._hang_timeout_s = hang_timeout_s
        # Set by `load`.
        self.info: EngineInfo
        # Idle channels to the process, one per concurrent batch.
        self._channels: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self._control, control = Pipe()
        with control:
            handle = control.fileno()
            self._process = ChildProcess(
                "worker process",
                run_worker,
                (handle,),
                handles=[handle],
                environment=resources.environment,
                cores=resources.cores,
            )
        with contextlib.suppress(OSError):  # if the process has ended already, `load` reports that
            self._control.send(loader)
        # Future that completes when the process ends. Its result is a message with the exit status
        # or signal of the process.
        self.exited = self._process.exited
        self.exited.add_done_callback(lambda _: self._close_channels())

    def successor(self) -> Self:
        """Start a new process with the same engine and resources, and return its handle.

        The caller must call `load` of the new handle. The old process keeps running.
        """
        return type(self)(self.loader, self.resources, self._hang_timeout_s)

    def load(self) -> None:
        """Wait until the process has loaded its engine.

        Raises:
            BundleError: the bundle (exported model) is damaged, or has no model file for the
                loader's precision and backend.
            BackendError: the backend cannot run on this machine, or cannot compute batches of
                the loader's maximum size. Or the worker process ended, or the calling process has
                too few file descriptors for the channels.
        """
        try:
            reply = self._control.recv()
            if isinstance(reply, Exception):
                raise reply
            self.info = reply
            for _ in range(self.info.concurrency):
                self._channels.put(Channel.receive_from(self._control))
            self._control.close()
        except (EOFError, OSError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise BackendError(
                    f"loading the model failed: {error.strerror}; raise the limit of open files "
                    "with ulimit -n"
                ) from None
            raise self._load_error() from None

    @property
    def is_spare(self) -> bool:
        """True if the worker is superfluous: started for an additional GPU, but running on the CPU.

        This happens if the loaded backend cannot use GPUs.
        """
        return self.resources.is_for_gpu and self.info.device == "cpu"

    def warm_up(self, max_batch: int) -> None:
        """Warm up the engine with batches of up to `max_batch` images, without a time limit.

        Raises:
            BackendError: the engine fails, or the process ends.
            BundleError: the model's outputs contradict the bundle's manifest.
        """
        try:
            self._call("warm_up", max_batch, timeout_s=None)
        except BackendDownError:
            raise self._load_error() from None

    def compute(self, items: Sequence[Item]) -> Sequence[Result]:
        """Return one result per item of a batch. All items have the same input size.

        Raises:
            BackendDownError: the process ended, or was killed after `hang_timeout_s`.
            BackendError: the engine failed on the batch.
            BundleError: the model's outputs contradict the bundle's manifest.
        """
        results: Sequence[Result] = self._call("compute", items, timeout_s=self._hang_timeout_s)
        return results

    def close(self) -> None:
        """Wait for in-flight batches, close the engine and end the process.

        `load` must have been called. If a batch or the end of the process takes longer than
        10 s, the process is killed.
        """
        with contextlib.suppress(queue.Empty, OSError):  # TimeoutError is an OSError
            for _ in range(self.info.concurrency):
                self._channels.get(timeout=_CLOSE_TIMEOUT_S).send(None)
            self.exited.result(_CLOSE_TIMEOUT_S)
        self.kill()
        self.exited.result()

    def kill(self) -> None:
        """Kill the process. Methods that wait for the process then raise BackendError."""
        self._process.kill()

    def _load_error(self) -> BackendError:
        """Wait until the process has ended. Return the error that `load` or `warm_up` raises."""
        return BackendError(
            f"loading the model failed: {self.exited.result()}; see the log for the reason"
        )

    def _call(self, method: str, argument: Any, *, timeout_s: float | None) -> Any:
        channel = self._channels.get()
        try:
            channel.send((method, argument))
            if not channel.poll(timeout_s):
                _log.error(
                    "killing worker process %d of %s: a batch takes longer than hang_timeout_s "
                    "(%g s)",
                    *(self._process.pid, self.loader, timeout_s),
                )
                self.kill()
                raise EOFError
            reply = channel.receive(copy=True)
        except (EOFError, OSError):
            channel.close()  # its next reply may be to this call
            raise BackendDownError(
                "the worker process that computed the batch ended; try again later"
            ) from None
        finally:
            self._channels.put(channel)
            if self.exited.done():
                self._close_channels()
        if isinstance(reply, Exception):
            raise reply
        return reply

    def _close_channels(self) -> None:
        # Frees the channels' shared memory even if a logged exception keeps this object alive.
        with contextlib.suppress(queue.Empty):  # other threads take channels too
            for _ in range(self._channels.qsize()):
                channel = self._channels.get_nowait()
                channel.close()
                self._channels.put(channel)


def start_workers(
    loader: EngineLoader[Item, Result], resources: Iterable[WorkerResources], hang_timeout_s: float
) -> list[WorkerProcess[Item, Result]]:
    """Start and return one `WorkerProcess` per entry of `resources`.

    If a process cannot be started, the started processes are killed and the error is raised.
    `hang_timeout_s` is the time limit of a batch in seconds.
    """
    with contextlib.ExitStack() as started:
        processes = []
        for share in resources:
            processes.append(WorkerProcess(loader, share, hang_timeout_s))
            started.callback(processes[-1].kill)
        started.pop_all()
    return processes
