"""CUDA kernels compiled by NVRTC, which needs neither a GPU nor the CUDA toolkit.

What was compiled is kept in the user's cache folder under a hash of everything that decides it:
source, headers, options and the compiler's version.
"""

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from cuda.bindings import nvrtc

from .user_cache import cache_folder, store

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
"""Compute capabilities that every kernel is compiled for in the tests, ten times their number."""

Code = Literal["cubin", "ptx"]

_FOLDER = Path(__file__).parent / "kernels"
_Result = TypeVar("_Result")


class KernelError(Exception):
    """A kernel cannot be compiled, loaded or launched."""


@dataclass(frozen=True)
class Kernel:
    """A CUDA kernel and what is fixed when it is compiled."""

    source: str
    """File in `plugins/kernels`."""
    name: str
    """The kernel's `extern "C"` name in that file."""
    constants: tuple[tuple[str, int | float | str], ...] = ()
    """Macros: integers, single-precision numbers, and names of types."""
    fused_multiply_add: bool = False
    """Let the compiler contract `a * b + c`, where bits need not match another implementation."""


class Launch(NamedTuple):
    """How a kernel is launched; sizes may be symbolic, so only `+ - * //` made them.

    A kernel's arguments are its input pointers, then the scalars, then its output pointers.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    scalars: tuple[int, ...] = ()
    """Arguments of type int32."""


def compiled(kernel: Kernel, architecture: int, code: Code) -> bytes:
    """Machine code or PTX of a kernel, from the cache if it was compiled before.

    Args:
        kernel: what to compile.
        architecture: compute capability, ten times its number: 90 for 9.0.
        code: `cubin` runs on that architecture alone, `ptx` on newer ones too.

    Raises:
        KernelError: the compiler refuses the source or does not know the architecture.
    """
    options = _options(kernel, architecture, code)
    path = cache_folder("kernels") / f"{_digest(kernel.source, options)}.{code}"
    try:
        return path.read_bytes()
    except OSError:
        pass
    binary = _compile(kernel, options, code)
    store(path, binary)
    return binary


def known_architecture(architecture: int) -> int:
    """The newest that the installed NVRTC compiles for, up to the one given.

    A GPU that is newer than the compiler runs the PTX of that one.
    """
    return max((a for a in known_architectures() if a <= architecture), default=architecture)


@functools.cache
def known_architectures() -> tuple[int, ...]:
    """All that the installed NVRTC compiles for, ascending."""
    return tuple(_checked(nvrtc.nvrtcGetSupportedArchs()))


def _options(kernel: Kernel, architecture: int, code: Code) -> tuple[str, ...]:
    target = "sm" if code == "cubin" else "compute"
    return (
        f"--gpu-architecture={target}_{architecture}",
        "--std=c++17",
        f"--fmad={str(kernel.fused_multiply_add).lower()}",
        *(f"-D{name}={_literal(value)}" for name, value in kernel.constants),
    )


def _literal(value: int | float | str) -> str:
    """A macro's value: hexadecimal for what is not whole, so that no digit is lost."""
    return f"{value.hex()}f" if isinstance(value, float) else str(value)


@functools.cache
def _headers() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(_FOLDER.glob("*.cuh"))}


@functools.cache
def _source(name: str) -> bytes:
    return (_FOLDER / name).read_bytes()


def _digest(source: str, options: tuple[str, ...]) -> str:
    parts = (
        _source(source),
        *_headers().values(),
        "\0".join(options).encode(),
        repr(_checked(nvrtc.nvrtcVersion())).encode(),
    )
    digest = hashlib.sha256()
    for part in parts:
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
            raise KernelError(
                f"{kernel.source} does not compile with {' '.join(options)}: {_log(program)}"
            )
        return _binary(program, code)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _log(program: nvrtc.nvrtcProgram) -> str:
    text = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
    _checked(nvrtc.nvrtcGetProgramLog(program, text))
    return text.decode(errors="replace").strip("\0 \n")


def _binary(program: nvrtc.nvrtcProgram, code: Code) -> bytes:
    if code == "cubin":
        binary = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, binary))
    else:
        binary = bytes(_checked(nvrtc.nvrtcGetPTXSize(program)))
        _checked(nvrtc.nvrtcGetPTX(program, binary))
    return binary


def _checked(result: tuple[nvrtc.nvrtcResult, *tuple[_Result, ...]]) -> _Result:
    """What an NVRTC function returns beside its status; None if nothing.

    Raises:
        KernelError: the status is no success.
    """
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelError(f"NVRTC: {nvrtc.nvrtcGetErrorString(status)[1].decode()}")
    if len(values) < 2:
        return values[0] if values else None  # type: ignore[return-value]
    return tuple(values)  # type: ignore[return-value]
