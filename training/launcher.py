"""Start the training processes of one machine with the launcher of `torchrun`."""

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from ..model.child_process import module_command
from .config import ConfigError
from .devices import Device, processes_to_start

# Signals that torch's launcher handles itself.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Environment variable of a training process: the process ID of `maskrcnn train`, which started it.
_LAUNCHER = "MASKRCNN_LAUNCHER"
# Interval in seconds at which a training process checks whether its launcher is running.
_CHECK_S = 1.0


def launch_processes(device: Device, processes: int | None) -> None:
    """Run the current command in the configured number of training processes, and then exit.

    The exit code is 0, or that of the process that failed first. If the configured number is 1, or
    if this process is already a training process, return without starting processes. A process
    that this function has started receives SIGTERM when its parent process ends.

    Args:
        device: Key `device` of the configuration.
        processes: Key `processes` of the configuration.

    Raises:
        ConfigError: `device` lists GPU indices and `processes` differs from their count, or a
            signal such as SIGKILL ended a process.
    """
    try:
        count = processes_to_start(device, processes)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if count > 1:
        sys.exit(_run_in_processes(count, sys.argv[1:]))
    if os.environ.get(_LAUNCHER) == str(os.getppid()):
        threading.Thread(target=_end_with_launcher, args=(os.getppid(),), daemon=True).start()


def _end_with_launcher(launcher: int) -> None:
    """Send SIGTERM to this process when its launcher, the process with the given ID, has ended.

    Otherwise, the ranks would keep training and occupy the GPUs after SIGKILL ended the launcher.
    """
    # Not `prctl(PR_SET_PDEATHSIG)`: the kernel sends this signal once for each thread of the
    # launcher that gets the process as its child, and a second SIGTERM ends a rank immediately.
    while os.getppid() == launcher:
        time.sleep(_CHECK_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _run_in_processes(count: int, arguments: Sequence[str]) -> int:
    """Run `maskrcnn` in several training processes. Return the exit code for this process.

    The exit code is 0, or the code of the process that failed first. Signals are passed on to the
    processes. If one process fails, the others are ended.

    Args:
        count: Number of processes.
        arguments: Command line after `maskrcnn`.

    Raises:
        ConfigError: A signal such as SIGKILL ended a process.
    """
    # Import torch here, because the import takes seconds. At the top of this module, it would also
    # delay `--help` and messages about mistyped keys.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

    # The processes print their own errors, so silence those of torch's launcher.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # The ranks connect to this store. It is open already, so no other program can take its port.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    previous = {number: signal.getsignal(number) for number in _SIGNALS}
    executable, *options = module_command(__package__.partition(".")[0])
    command = (*options, *arguments)
    with tempfile.TemporaryDirectory() as folder:
        processes = start_processes(
            "train",
            executable,
            dict.fromkeys(range(count), command),
            {rank: rank_environment(rank, count, store.port) for rank in range(count)},
            DefaultLogsSpecs(log_dir=folder),
        )

        forwarded: set[int] = set()

        def forward(number: int, _: FrameType | None) -> None:
            # Pass the signal on. torch's own handler would kill the ranks before they have written
            # a checkpoint.
            forwarded.add(number)
            for pid in processes.pids().values():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

        for number, handler in previous.items():
            # A signal that is ignored, such as SIGHUP under `nohup`, stays ignored.
            signal.signal(number, handler if handler == signal.SIG_IGN else forward)
        result = processes.wait(period=0.2)
    if result is None or not result.is_failed():
        return 0
    # Find the rank that failed first. After a failure, torch's launcher ends all other ranks with
    # SIGTERM, so prefer a rank that SIGTERM did not end. If there are several, prefer one that
    # another signal killed: the others may have lost the connection to it and exited with an error.
    rank, first = min(
        result.failures.items(),
        key=lambda failure: (failure[1].exitcode == -signal.SIGTERM, failure[1].exitcode > 0),
    )
    # A forwarded signal kills a rank only if the training has not begun, or if it arrives twice.
    if -first.exitcode in forwarded:
        return 128 - first.exitcode
    if first.exitcode < 0:
        raise ConfigError(
            f"{signal.Signals(-first.exitcode).name} ended the training process of rank {rank}; if "
            "memory ran out, lower solver.images_per_batch or data.workers"
        )
    return first.exitcode


def rank_environment(rank: int, count: int, port: int) -> dict[str, str]:
    """Return the environment variables that a rank on this machine needs to join the process group.

    Args:
        rank: Rank of the process.
        count: Number of ranks.
        port: Port of the process group's `TCPStore` on this machine.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        # Divide the cores among the processes. Otherwise, each process would start one thread per
        # core of the machine.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
        _LAUNCHER: os.getpid(),
    }
    return {name: str(value) for name, value in values.items()}
