import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest

from maskrcnn_trt.serving.host import (
    gpu_names,
    installed_versions,
    name_thread,
    notify_service_manager,
)


@pytest.mark.parametrize(
    ("program", "names"),
    [
        (
            "#!/bin/sh\necho 'NVIDIA H100, 80GB, 580.1'; echo 'NVIDIA L4, 550.2'\n",
            ("NVIDIA H100, 80GB (driver 580.1)", "NVIDIA L4 (driver 550.2)"),
        ),
        ("#!/bin/sh\necho 'no devices were found'; exit 6\n", ()),
        ("", ()),
        (None, ()),
    ],
)
def test_gpu_names_come_from_nvidia_smi(
    program: str | None,
    names: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if program is not None:
        path = tmp_path / "nvidia-smi"
        path.write_text(program)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    assert gpu_names() == names


def test_installed_versions() -> None:
    expected = {"grpcio": metadata.version("grpcio")}
    assert installed_versions(["grpcio", "no-such-distribution"]) == expected


@pytest.mark.parametrize("abstract", [False, True])
def test_states_reach_the_service_manager(
    abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{tmp_path.name}-{os.getpid()}" if abstract else str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", f"@{path}" if abstract else path)
    notify_service_manager("READY=1")  # nobody listens
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{path}" if abstract else path)
        notify_service_manager("READY=1")
        assert manager.recv(64) == b"READY=1"
        monkeypatch.delenv("NOTIFY_SOCKET")
        notify_service_manager("READY=1")
        manager.setblocking(False)
        with pytest.raises(BlockingIOError):
            manager.recv(64)


def test_threads_are_named_for_the_system() -> None:
    with ThreadPoolExecutor(1, initializer=name_thread, initargs=("a thread",)) as pool:
        number = pool.submit(threading.get_native_id).result()
        assert Path(f"/proc/self/task/{number}/comm").read_text() == "a thread\n"
