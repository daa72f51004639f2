"""Execution of CUDA kernels on the CPU, compiled by the host's C++ compiler.

Threads of a kernel cannot communicate: kernels with shared memory, barriers or warp functions are
not supported.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import maskrcnn_trt
from maskrcnn_trt.plugins.runtime.compilation import Kernel, Launch

_PLUGINS = Path(maskrcnn_trt.__path__[0]) / "plugins"
_PROGRAM = """
#include <algorithm>
#include <cmath>
#include <utility>
#define __global__
#define __device__ inline
using std::max;
using std::min;
struct Index {{ int x, y, z; }};
static Index blockIdx, threadIdx, blockDim;
#include "{source}"

template <typename... Parameters, size_t... I>
void call(void (*kernel)(Parameters...), void** values, std::index_sequence<I...>) {{
    kernel(*static_cast<Parameters*>(values[I])...);
}}
template <typename... Parameters>
void call(void (*kernel)(Parameters...), void** values) {{
    call(kernel, values, std::index_sequence_for<Parameters...>());
}}
extern "C" void run(Index grid, Index block, void** values) {{
    blockDim = block;
    for (int i = 0; i < grid.x * grid.y * grid.z; ++i) {{
        blockIdx = {{i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y}};
        for (int j = 0; j < block.x * block.y * block.z; ++j) {{
            threadIdx = {{j % block.x, j / block.x % block.y, j / block.x / block.y}};
            call({name}, values);
        }}
    }}
}}
"""


class _Index(ctypes.Structure):
    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int), ("z", ctypes.c_int))


def launch_on_host(
    kernel: Kernel, launch: Launch, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> None:
    """Run a kernel on the CPU. The arguments are those of `launch_kernel`, with CPU tensors."""
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (*inputs, *outputs)]
    scalars = map(ctypes.c_int, launch.scalars)
    values: list[Any] = [*pointers[: len(inputs)], *scalars, *pointers[len(inputs) :]]
    addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    _compiled(kernel).run(_Index(*launch.grid), _Index(*launch.block), addresses)


@functools.cache
def _compiled(kernel: Kernel) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        text = _PROGRAM.format(source=_PLUGINS / kernel.source, name=kernel.name)
        source.write_text(text)
        constants = [f"-D{name}={value}" for name, value in kernel.constants]
        # As on the GPU, products and sums are not fused.
        options = ["-O2", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-w"]
        command = [compiler, *options, *constants, str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))
