"""Stubs of NVIDIA's driver: the functions of CUDA and NVML that the server calls."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

# C source of the CUDA stub. The index of a GPU is its PCI bus. CUDA finds $GPUS GPUs, or those in
# $CUDA_VISIBLE_DEVICES. GPU memory is host memory, of which there is 1 GiB. Work in streams is done
# at once, but an event is not ready at its first query. Streams, events, graphs and pinned memory
# take GPU memory too, so that a test notices if one is not freed. Functions that use a GPU fail if
# none is current in the calling thread. Graphs can contain only copies, and only one stream at a
# time can be captured.
_CUDA = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
enum { OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_CONTEXT = 201, NOT_READY = 600 };
#define IF_CURRENT if (!depth) return INVALID_CONTEXT
typedef unsigned long long u64;
static __thread int depth;
static u64 used;
static int allocate(u64 *address, size_t size) {
    IF_CURRENT;
    if (used + size > 1ull << 30)
        return OUT_OF_MEMORY;
    u64 *block = aligned_alloc(256, (size + 511) / 256 * 256);
    *block = size;
    __atomic_fetch_add(&used, size, __ATOMIC_SEQ_CST);
    *address = (u64)block + 256;
    return 0;
}
static int release(u64 address) {
    IF_CURRENT;
    u64 *block = (u64 *)(address - 256);
    __atomic_fetch_sub(&used, *block, __ATOMIC_SEQ_CST);
    free(block);
    return 0;
}
int cuMemAlloc(u64 *address, size_t size) { return allocate(address, size); }
int cuMemFree(u64 address) { return release(address); }
int cuMemHostAlloc(u64 *address, size_t size, unsigned flags) { return allocate(address, size); }
int cuMemFreeHost(u64 address) { return release(address); }
int cuStreamCreate(u64 *stream, unsigned flags) { return allocate(stream, 8); }
int cuStreamDestroy(u64 stream) { return release(stream); }
int cuStreamWaitEvent(u64 stream, u64 event, unsigned flags) { IF_CURRENT; return 0; }
int cuEventCreate(u64 *event, unsigned flags) { return allocate(event, 8); }
int cuEventDestroy(u64 event) { return release(event); }
int cuEventRecord(u64 event, u64 stream) { IF_CURRENT; *(int *)event = NOT_READY; return 0; }
int cuEventQuery(u64 event) {
    IF_CURRENT;
    int state = *(int *)event;
    *(int *)event = 0;
    return state;
}
typedef struct { u64 to, from; size_t size; } Copy;
enum { MOST_COPIES = 256 };
typedef struct { int count; Copy copies[MOST_COPIES]; } Graph;
static u64 captured_stream, captured_graph;
int cuStreamBeginCapture_v2(u64 stream, int mode) {
    if (captured_stream || allocate(&captured_graph, sizeof(Graph)))
        return INVALID_CONTEXT;
    ((Graph *)captured_graph)->count = 0;
    captured_stream = stream;
    return 0;
}
int cuStreamEndCapture(u64 stream, u64 *graph) {
    IF_CURRENT;
    *graph = captured_graph;
    captured_stream = 0;
    return 0;
}
int cuStreamIsCapturing(u64 stream, int *status) { *status = stream == captured_stream; return 0; }
int cuGraphInstantiateWithFlags(u64 *executable, u64 graph, u64 flags) {
    int status = allocate(executable, sizeof(Graph));
    if (!status)
        *(Graph *)*executable = *(Graph *)graph;
    return status;
}
int cuGraphDestroy(u64 graph) { return release(graph); }
int cuGraphExecDestroy(u64 graph) { return release(graph); }
int cuMemcpyHtoDAsync(u64 to, u64 from, size_t size, u64 stream) {
    IF_CURRENT;
    if (stream == captured_stream) {
        Graph *graph = (Graph *)captured_graph;
        graph->copies[graph->count++] = (Copy){to, from, size};
    } else
        memcpy((void *)to, (void *)from, size);
    return 0;
}
int cuGraphLaunch(u64 executable, u64 stream) {
    IF_CURRENT;
    Graph *graph = (Graph *)executable;
    for (Copy *copy = graph->copies; copy < graph->copies + graph->count; copy++)
        memcpy((void *)copy->to, (void *)copy->from, copy->size);
    return 0;
}
int cuMemcpyDtoHAsync(u64 to, u64 from, size_t size, u64 stream) {
    return cuMemcpyHtoDAsync(to, from, size, stream);
}
int cuMemcpyDtoDAsync(u64 to, u64 from, size_t size, u64 stream) {
    return cuMemcpyHtoDAsync(to, from, size, stream);
}
int cuMemGetInfo(size_t *left, size_t *total) {
    IF_CURRENT;
    *total = 1ull << 30;
    *left = *total - used;
    return 0;
}
int cuCtxPushCurrent(void *context) { depth++; return 0; }
int cuCtxPopCurrent(void **context) { depth--; return 0; }
int cuCtxSynchronize(void) { IF_CURRENT; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int gpu) { *context = (void *)1; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int gpu) {
    *value = attribute == 75 ? 9 : 0;  // compute capability 9.0
    return 0;
}
int cuDeviceGetName(char *name, int size, int gpu) { strncpy(name, "Stub GPU", size); return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorString(int status, const char **text) {
    *text = status == OUT_OF_MEMORY ? "out of memory" : "stub error";
    return 0;
}
// cuda-bindings finds all functions by this one.
int cuGetProcAddress_v2(const char *name, void **address, int version, u64 flags, int *status) {
    *address = dlsym(dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY), name);
    return 0;
}
int cuInit(unsigned flags) { return atoi(getenv("GPUS")) ? 0 : NO_DEVICE; }
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
# C source of the NVML stub. Each query of a GPU's energy adds 1.5 J. The second GPU does not
# support power queries, and all further GPUs are lost. If the file $NO_DRIVER exists,
# initialization fails because the driver is not loaded, and the energies restart at 0.
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
    """Build the stubs unless they exist. Return the environment of a process that uses them.

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
