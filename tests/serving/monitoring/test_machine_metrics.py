"""Collectors of the event loop lag and of GPUs, with a stub driver and with the real one."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from driver_stubs import needs_compiler, stubbed_driver
from open_files import no_free_files
from prometheus_client.parser import text_string_to_metric_families
from scraped_metrics import metrics_from_log, read
from server_load import server_process

from maskrcnn_trt.serving.monitoring.machine_metrics import GPU_METRICS, CpuCollector, LoopLag

PROGRAM = """
import logging
from prometheus_client import CollectorRegistry, generate_latest
from maskrcnn_trt.serving.monitoring.machine_metrics import GpuCollector
logging.basicConfig(level=logging.INFO)
registry = CollectorRegistry()
registry.register(GpuCollector())
print(generate_latest(registry).decode())
"""

Gpus = dict[str, dict[str, float]]


def gpus_in(text: str) -> Gpus:
    """Return the metric values of each GPU in a scraped text."""
    gpus: Gpus = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "gpu_uuid" in sample.labels:
                gpus[sample.labels["gpu_uuid"]][sample.name] = sample.value
    return gpus


def gpus_seen(environment: dict[str, str]) -> Gpus:
    """Return the metric values that a process exports, and check that it logs nothing."""
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    return gpus_in(result.stdout)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for the stubs, which are built once."""
    return tmp_path_factory.mktemp("driver")


@needs_compiler
def test_server_exports_the_values_of_its_gpus(
    wide_bundle: Path, libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in stubbed_driver(libraries, gpus=2).items():
        monkeypatch.setenv(name, value)
    no_driver, log = Path(os.environ["NO_DRIVER"]), tmp_path / "log"
    with server_process(wide_bundle, log, "--metrics-port", "0"):
        url = metrics_from_log(log.read_text()).url

        def scrape() -> Gpus:
            return gpus_in(read(url))

        common = {"nv_gpu_memory_total_bytes": 80 << 30, "nv_gpu_memory_used_bytes": 3 << 30}
        power = {"nv_gpu_power_usage": 123.456, "nv_gpu_power_limit": 700}
        for joules in (1.5, 3):
            energy = {"nv_energy_consumption": joules}
            assert scrape() == {
                "GPU-0": {"nv_gpu_utilization": 0.25, **common, **power, **energy},
                "GPU-1": {"nv_gpu_utilization": 0.75, **common, **energy},
            }
        no_driver.touch()
        assert scrape() == {}
        no_driver.unlink()
        # A reloaded driver counts the energy from zero.
        assert [gpu["nv_energy_consumption"] for gpu in scrape().values()] == [0, 0]
        assert [gpu["nv_energy_consumption"] for gpu in scrape().values()] == [1.5, 1.5]
    assert "GPU-" not in log.read_text()
    assert "Traceback" not in log.read_text()


@needs_compiler
@pytest.mark.parametrize(
    ("gpus", "visible", "expected"),
    [
        (2, "1", {"GPU-1"}),
        (2, "", set()),
        (0, None, set()),
        (3, None, {"GPU-0", "GPU-1"}),  # NVML does not know the third
    ],
)
def test_only_gpus_visible_to_cuda_are_exported(
    gpus: int, visible: str | None, expected: set[str], libraries: Path
) -> None:
    environment = stubbed_driver(libraries, gpus)
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    assert gpus_seen(environment).keys() == expected


@needs_compiler
def test_nothing_is_exported_without_a_driver(libraries: Path, tmp_path: Path) -> None:
    environment = stubbed_driver(libraries, gpus=2)
    assert gpus_seen(environment | {"NO_DRIVER": str(tmp_path)}) == {}
    for library in libraries.glob("*.so.1"):
        (tmp_path / library.name).write_bytes(b"no library")
    assert gpus_seen(environment | {"LD_LIBRARY_PATH": str(tmp_path)}) == {}


@pytest.mark.gpu
def test_real_driver(picture: Callable[..., bytes]) -> None:
    import torch

    query = ["nvidia-smi", "--query-gpu=uuid,memory.total,power.limit"]
    listed = subprocess.check_output([*query, "--format=csv,noheader,nounits"], text=True)
    limits = {}
    for line in listed.splitlines():
        uuid, mebibytes, watts = line.split(", ")
        limits[uuid] = int(mebibytes) << 20, float(watts)
    count = torch.cuda.device_count()
    visible = [f"GPU-{torch.cuda.get_device_properties(n).uuid}" for n in range(count)]
    found = gpus_seen(dict(os.environ))
    assert set(found) == set(visible)
    for uuid, values in found.items():
        assert values.keys() == set(GPU_METRICS)
        assert values["nv_gpu_memory_total_bytes"] == limits[uuid][0]
        assert 0 < values["nv_gpu_memory_used_bytes"] < limits[uuid][0]
        assert values["nv_gpu_power_limit"] == pytest.approx(limits[uuid][1], abs=0.01)
        assert 0 < values["nv_gpu_power_usage"] < 2 * limits[uuid][1]
        assert 0 <= values["nv_gpu_utilization"] <= 1
        assert 0 <= values["nv_energy_consumption"] < 1e4
    for shown, expected in (("", set()), (visible[0], {visible[0]})):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": shown}
        assert gpus_seen(environment).keys() == expected


def test_blocked_event_loop_is_measured() -> None:
    lag = LoopLag()

    async def block() -> None:
        measuring = asyncio.create_task(lag.run())
        await asyncio.sleep(0.15)
        time.sleep(0.4)
        await asyncio.sleep(0.15)
        measuring.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await measuring

    asyncio.run(block())
    assert lag.worst_s >= 0.3
    assert lag.worst_s >= lag.last_s >= 0


async def test_cpu_is_measured_again_after_a_lack_of_file_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("maskrcnn_trt.serving.monitoring.machine_metrics._CPU_INTERVAL_S", 0.01)
    with no_free_files():
        task = asyncio.create_task(CpuCollector().run())
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.05)
    with no_free_files():
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.05)
    assert not task.done()
    task.cancel()
