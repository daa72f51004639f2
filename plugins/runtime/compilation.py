"""Compilation of CUDA kernels by NVRTC, which needs neither a GPU nor the CUDA toolkit.

Compiled kernels are cached in the user's cache folder. File names are hashes of source, headers,
options and compiler version.
"""

import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from cuda.bindings import nvrtc

from .user_cache import cache_folder, write_cached

# Compute capabilities that the tests compile every kernel for, times ten.
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)

Code = Literal["cubin", "ptx"]

_FOLDER = Path(__file__).parents[1]
_Result = TypeVar("_Result")


class KernelError(Exception):
    """A CUDA kernel cannot be compiled, loaded or launched."""


@dataclass(frozen=True)
class Kernel:
    """CUDA kernel with its compile-time constants."""

    # Path of the `.cu` file relative to `plugins`.
    source: str
    # The kernel's `extern "C"` name in that file.
    name: str
    # Names and values of macros. A value is an integer, a float32 number or a type name.
    constants: tuple[tuple[str, int | float | str], ...] = ()
    # Whether the compiler may fuse `a * b + c`. False if results must equal the CPU's bit for bit.
    fused_multiply_add: bool = False
    # Bytes of dynamic shared memory per block.
    shared_memory: int = 0


class Launch(NamedTuple):
    """Grid size, block size and scalar arguments with which a kernel is launched.

    A kernel takes the pointers of its inputs, then the scalars, then the pointers of its outputs.
    """

    # All values may be TensorRT's symbolic integers, so compute them only with `+ - * //`.

    # Number of blocks along x, y and z.
    grid: tuple[int, int, int]
    # Number of threads per block along x, y and z.
    block: tuple[int, int, int]
    # Arguments of type int32.
    scalars: tuple[int, ...] = ()


def compile_kernel(
    kernel: Kernel, architecture: int, code: Code, entry: str | None = None
) -> bytes:
    """Return the machine code or PTX of a kernel, compiled or from the cache.

    Args:
        kernel: the kernel to compile.
        architecture: compute capability times ten, such as 90 for 9.0.
        code: `cubin` runs only on this architecture, `ptx` also on newer ones.
        entry: name of the compiled function. None: use `kernel.name`.

    Raises:
        KernelError: the compiler rejects the source or does not support the architecture.
    """
    options = _options(kernel, architecture, code)
    if entry is not None:
        options += (f"-D{kernel.name}={entry}",)
    # The file name is a hash of all inputs of the compiler, so a cached file is never stale.
    path = cache_folder("kernels") / f"{_digest(kernel.source, options)}.{code}"
    try:
        return path.read_bytes()
    except OSError:
        pass
    binary = _compile(kernel, options, code)
    write_cached(path, binary)
    return binary


def unique_entry(kernel: Kernel, architecture: int) -> str:
    """Return a function name that is unique to a kernel's source, constants and architecture.

    With such names, a TensorRT plan can hold kernels that differ only in their constants.
    """
    return f"{kernel.name}_{_digest(kernel.source, _options(kernel, architecture, 'ptx'))[:16]}"


def ptx_version(ptx: bytes) -> str:
    """Return the version of the PTX language that PTX code is written in, such as `9.0`."""
    match = re.search(rb"^\.version (\S+)", ptx, re.MULTILINE)
    assert match is not None
    return match[1].decode()


@functools.cache
def nvrtc_cuda_version() -> int:
    """Return NVRTC's CUDA version, such as 13000 for CUDA 13.0.

    A GPU driver of an older CUDA version may reject the PTX that NVRTC generates.
    """
    major, minor = _checked(nvrtc.nvrtcVersion())
    return int(1000 * major + 10 * minor)


def newest_supported_architecture(architecture: int) -> int:
    """Return the newest architecture, at most `architecture`, that the installed NVRTC supports.

    Architectures are compute capabilities times ten. If NVRTC supports only newer architectures,
    return `architecture`. Compilation for it then raises an error.
    """
    # A GPU that is newer than the compiler runs the PTX of this architecture.
    return max((a for a in supported_architectures() if a <= architecture), default=architecture)


@functools.cache
def supported_architectures() -> tuple[int, ...]:
    """Return the compute capabilities that NVRTC supports, times ten, in ascending order."""
    return tuple(_checked(nvrtc.nvrtcGetSupportedArchs()))


def _options(kernel: Kernel, architecture: int, code: Code) -> tuple[str, ...]:
    target = "sm" if code == "cubin" else "compute"
    # A cubin for capability 9.0 runs only on such GPUs, so it may use instructions that newer GPUs
    # lack.
    suffix = "a" if code == "cubin" and architecture == 90 else ""
    return (
        f"--gpu-architecture={target}_{architecture}{suffix}",
        "--std=c++17",
        f"--fmad={str(kernel.fused_multiply_add).lower()}",
        *(f"-D{name}={_literal(value)}" for name, value in kernel.constants),
    )


def _literal(value: int | float | str) -> str:
    # Hexadecimal floating-point literals are exact.
    return f"{value.hex()}f" if isinstance(value, float) else str(value)


@functools.cache
def _headers() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(_FOLDER.glob("*/*.cuh"))}


@functools.cache
def _source(name: str) -> bytes:
    return (_FOLDER / name).read_bytes()


def _digest(source: str, options: tuple[str, ...]) -> str:
    parts = (
        _source(source),
        *_headers().values(),
        "\0".join(options).encode(),
        str(nvrtc_cuda_version()).encode(),
    )
    digest = hashlib.sha256()
    for part in parts:
        # The length separates the parts, so that text moved from one part to the next changes the
        # hash.
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _compile(kernel: Kernel, options: tuple[str, ...], code: Code) -> bytes:
    headers = _headers()
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            _source(kernel.source),
            kernel.source.encode(),
            len(headers),
            list(headers.values()),
            [name.encode() for name in headers],
        )
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(
            program, len(options), [option.encode() for option in options]
        )
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = _output(program, "ProgramLog").decode(errors="replace").strip("\0 \n")
            raise KernelError(
                f"the CUDA source {kernel.source} does not compile with {' '.join(options)}: {log}"
            )
        return _output(program, code.upper())
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _output(program: nvrtc.nvrtcProgram, name: str) -> bytes:
    """Return an output of a compiled NVRTC program: `name` is `CUBIN`, `PTX` or `ProgramLog`."""
    # NVRTC fills the buffer, although `bytes` are immutable in Python.
    buffer = bytes(_checked(getattr(nvrtc, f"nvrtcGet{name}Size")(program)))
    _checked(getattr(nvrtc, f"nvrtcGet{name}")(program, buffer))
    return buffer


def _checked(result: tuple[nvrtc.nvrtcResult, *tuple[_Result, ...]]) -> _Result:
    """Return the results of an NVRTC call without the status.

    Return a single result itself, several results as a tuple, and None if there are no results.

    Raises:
        KernelError: the status is an error.
    """
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelError(
            "a call of NVRTC, CUDA's runtime compiler, failed: "
            f"{nvrtc.nvrtcGetErrorString(status)[1].decode()}"
        )
    if len(values) < 2:
        return values[0] if values else None  # type: ignore[return-value]
    return tuple(values)  # type: ignore[return-value]
