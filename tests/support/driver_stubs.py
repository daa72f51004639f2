"""Stubs of NVIDIA's driver: the functions of CUDA and NVML that the server calls."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

# The index of a GPU is its PCI bus. CUDA finds $GPUS of them, or those in $CUDA_VISIBLE_DEVICES.
_CUDA = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    *count = atoi(getenv("GPUS"));
    if (visible)
        for (*count = *visible != 0; *visible; visible++)
            *count += *visible == ',';
    return 0;
}
int cuDeviceGet(int *gpu, int ordinal) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    *gpu = ordinal;
    if (visible) {
        for (; ordinal; ordinal--)
            visible = strchr(visible, ',') + 1;
        *gpu = atoi(visible);
    }
    return 0;
}
int cuDeviceGetPCIBusId(char *id, int size, int gpu) {
    snprintf(id, size, "0000:%02x:00.0", gpu);
    return 0;
}
"""
# Each query of a GPU's energy adds 1.5 J. The second GPU does not support power queries, and the
# third is lost. While the file NO_DRIVER exists, the driver is not loaded.
_NVML = """
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
enum { NOT_SUPPORTED = 3, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };
typedef unsigned long long u64;
static u64 millijoules[2] = {1000000, 1000000};
static long index_of(void *gpu) { return (long)gpu - 1; }
int nvmlInitWithFlags(unsigned flags) {
    if (access(getenv("NO_DRIVER"), F_OK))
        return 0;
    millijoules[0] = millijoules[1] = 0;
    return DRIVER_NOT_LOADED;
}
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **gpu) {
    unsigned bus;
    sscanf(id, "%*x:%x", &bus);
    *gpu = (void *)(bus + 1L);
    return bus < 2 ? 0 : GPU_IS_LOST;
}
int nvmlDeviceGetUUID(void *gpu, char *uuid, unsigned size) {
    snprintf(uuid, size, "GPU-%ld", index_of(gpu));
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *gpu, unsigned rates[2]) {
    rates[0] = 25 + 50 * index_of(gpu);
    return 0;
}
int nvmlDeviceGetMemoryInfo_v2(void *gpu, u64 memory[5]) {
    memory[1] = 80ull << 30;
    memory[4] = 3ull << 30;
    return 0;
}
int nvmlDeviceGetPowerUsage(void *gpu, unsigned *milliwatts) {
    *milliwatts = 123456;
    return index_of(gpu) ? NOT_SUPPORTED : 0;
}
int nvmlDeviceGetPowerManagementLimit(void *gpu, unsigned *milliwatts) {
    *milliwatts = 700000;
    return index_of(gpu) ? NOT_SUPPORTED : 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *gpu, u64 *energy) {
    *energy = millijoules[index_of(gpu)] += 1500;
    return 0;
}
"""


def stubbed_driver(folder: Path, gpus: int) -> dict[str, str]:
    """Build the stubs unless they exist, and return an environment of processes that use them.

    Args:
        folder: Folder for the libraries.
        gpus: Number of GPUs. NVML finds only the first two.
    """
    for library, source in (("libcuda.so.1", _CUDA), ("libnvidia-ml.so.1", _NVML)):
        if not (folder / library).exists():
            command = ["cc", "-x", "c", "-", "-shared", "-fPIC", "-o", folder / library]
            subprocess.run(command, input=source, text=True, check=True)
    no_driver = str(folder / "no-driver")
    driver = {"LD_LIBRARY_PATH": str(folder), "NO_DRIVER": no_driver, "GPUS": str(gpus)}
    return {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | driver
