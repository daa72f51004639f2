import os
import subprocess
import sys
from pathlib import Path

import pytest

from maskrcnn_trt.model import host_resources
from maskrcnn_trt.model.host_resources import available_cores, available_memory, memory_limit


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the cgroups. Its file `own` lists those of this process."""
    monkeypatch.setattr(host_resources, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host_resources, "_OWN_CGROUPS", tmp_path / "own")
    return tmp_path


def test_available_memory_and_cores_are_within_the_machine() -> None:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_memory() <= pages
    assert 0 < available_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("memory", "cpu", "cores"),
    [("1048576\n", "50000 100000\n", 0.5), ("max\n", "max 100000\n", None)],
)
def test_limits_of_a_container_apply(
    memory: str, cpu: str, cores: float | None, folder: Path
) -> None:
    (folder / "memory.max").write_text(memory)
    (folder / "cpu.max").write_text(cpu)
    (folder / "own").write_text("0::/of/the/host\n")
    assert (available_memory() == 1 << 20) == (memory == "1048576\n")
    assert available_cores() == (cores or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("cgroups", "root", "name"),
    [
        ("0::/a.slice/b.service\n", "", "memory.max"),
        ("5:cpu:/\n4:memory,pids:/a.slice/b.service\n0::/\n", "memory", "memory.limit_in_bytes"),
    ],
)
def test_memory_limit_of_the_own_or_an_outer_cgroup_applies(
    cgroups: str, root: str, name: str, folder: Path
) -> None:
    service = folder / root / "a.slice" / "b.service"
    service.mkdir(parents=True)
    (folder / "own").write_text(cgroups)
    (service / name).write_text(f"{3 << 20}\n")
    assert memory_limit() == 3 << 20
    (service.parent / name).write_text(f"{2 << 20}\n")
    assert memory_limit() == 2 << 20


def test_cpu_quota_of_an_outer_cgroup_applies(folder: Path) -> None:
    (folder / "a.slice" / "b.service").mkdir(parents=True)
    (folder / "a.slice" / "cpu.max").write_text("25000 100000\n")
    (folder / "a.slice" / "b.service" / "cpu.max").write_text("max 100000\n")
    (folder / "own").write_text("0::/a.slice/b.service\n")
    assert available_cores() == 0.25


@pytest.mark.parametrize(
    ("cgroups", "root", "names", "entry"),
    [
        ("0::/a\n", "", ("memory.max", "memory.current"), "inactive_file"),
        (
            "4:memory:/a\n",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            "total_inactive_file",
        ),
    ],
)
def test_memory_in_use_of_a_cgroup_is_not_available(
    cgroups: str,
    root: str,
    names: tuple[str, str],
    entry: str,
    folder: Path,
) -> None:
    service = folder / root / "a"
    service.mkdir(parents=True)
    (folder / "own").write_text(cgroups)
    for name, mebibytes in zip(names, (9, 7), strict=True):
        (service / name).write_text(f"{mebibytes << 20}\n")
    (service / "memory.stat").write_text(f"anon 123\n{entry} {2 << 20}\n")
    assert memory_limit() == 9 << 20
    assert available_memory() == 4 << 20


def test_freed_memory_is_used_again_without_mapping_it_anew() -> None:
    script = """
import resource
from maskrcnn_trt.model.host_resources import keep_freed_memory

keep_freed_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(b"x") * (64 << 20)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    first, second = map(int, run.stdout.split())
    assert first > 1000 > 10 * second
