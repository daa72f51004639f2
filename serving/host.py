"""GPUs and installed packages of this machine, thread names, and messages to systemd."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Final

from .errors import BackendError

CUDA_VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
# Time limit in seconds for CUDA to list the GPUs.
_CUDA_TIMEOUT_S: Final = 60.0
# Program that prints the PCI bus ID of each GPU that CUDA lists, so that MIG, containers and
# environment variables are respected.
_BUS_IDS_PROGRAM: Final = """
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


def gpu_names() -> tuple[str, ...]:
    """Return `NAME (driver VERSION)` for each NVIDIA GPU. Empty if nvidia-smi fails."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, check=True, text=True, timeout=30)
    except (FileNotFoundError, subprocess.SubprocessError):
        return ()
    names = (line.rsplit(", ", 1) for line in result.stdout.splitlines())
    return tuple(f"{name} (driver {driver})" for name, driver in names)


def visible_gpus() -> list[str]:
    """Return the CUDA_VISIBLE_DEVICES entry (index or UUID) of each GPU that CUDA finds."""
    count = len(gpu_bus_ids())
    names = os.environ.get(CUDA_VISIBLE_DEVICES)
    return names.split(",")[:count] if names else [str(index) for index in range(count)]


def gpu_bus_ids() -> list[str]:
    """Return the PCI bus ID of each GPU that CUDA finds. MIG instances of one GPU share its ID.

    Raises:
        BackendError: the driver does not respond.
    """
    # A separate process, because a process that has loaded CUDA keeps every GPU open.
    command = [sys.executable, "-I", "-S", "-c", _BUS_IDS_PROGRAM]
    try:
        result = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=False, timeout=_CUDA_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise BackendError(
            f"CUDA does not list the GPUs within {_CUDA_TIMEOUT_S:g} s; check whether nvidia-smi "
            "responds, and restart the machine if it hangs"
        ) from None
    return result.stdout.splitlines()


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Map each installed package in `distributions` to its version. No package is imported."""
    versions = {}
    for name in distributions:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def name_thread(name: str) -> None:
    """Set the calling thread's name in top and ps. Linux keeps only the first 15 characters."""
    # Python itself does this only from 3.14 on.
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)


def notify_service_manager(state: str) -> None:
    """Send systemd a state, such as READY=1, if this process is a service of type notify."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with (
        contextlib.suppress(OSError),  # without the message, systemd itself reports a timeout
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection,
    ):
        if address.startswith("@"):  # an abstract address, which begins with a zero byte
            address = f"\0{address[1:]}"
        connection.sendto(state.encode(), address)
