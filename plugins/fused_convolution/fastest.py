"""Choice of the fastest of several implementations, by measuring them on the GPU.

Choices are kept in the user's cache folder, so that other processes use them without measuring.
Two implementations may differ in rounding.
"""

import functools
import hashlib
import json
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch

from ..runtime.user_cache import cache_folder, write_cached
from .libraries import UnsupportedError

# Number of runs of an implementation whose total time is measured.
_RUNS = 5
# The first implementation whose time is at most this multiple of the shortest time is chosen.
_TOLERANCE = 1.03

# Only one thread measures at a time. An implementation may itself call `run_fastest`.
_measuring = threading.RLock()

_Result = TypeVar("_Result")


def run_fastest(key: Hashable, implementations: Sequence[Callable[[], _Result]]) -> _Result:
    """Run the fastest implementation of an operation in the current stream.

    The first call with a key measures all implementations, unless an earlier process has measured
    them. While a CUDA graph is being captured, nothing is measured: a call with a new key runs the
    first supported implementation. The GPU of the operation must be current.

    Args:
        key: all properties that affect the durations, except for the GPU and the versions of its
            libraries: dtypes, shapes and options. Its `repr` must be the same in all processes.
        implementations: functions that queue the operation and return its output or outputs.

    Raises:
        UnsupportedError: no implementation is supported.
    """
    choices, name = _choices_of(torch.cuda.current_device()), f"{len(implementations)} {key!r}"
    if not torch.cuda.is_current_stream_capturing():
        with _measuring:
            if name not in choices:
                durations = [_milliseconds(implementation) for implementation in implementations]
                limit = _TOLERANCE * min(durations)
                if math.isfinite(limit):
                    choices.add(name, next(i for i, ms in enumerate(durations) if ms <= limit))
    chosen = [implementations[choices[name]]] if name in choices else []
    for implementation in (*chosen, *implementations):
        with suppress(UnsupportedError):
            return implementation()
    raise UnsupportedError(f"no implementation supports the operation {key}")


class Choices:
    """Record of the fastest implementation of each operation, kept in a JSON file.

    The file maps the name of an operation to the index of its fastest implementation in the
    argument `implementations` of `run_fastest`. The name consists of the number of implementations
    and the argument `key` of `run_fastest`.
    """

    def __init__(self, path: Path) -> None:
        """Load the JSON file `path`. If it is missing or damaged, start with an empty record."""
        self._path = path
        self._indices = self._read()

    def __contains__(self, name: str) -> bool:
        return name in self._indices

    def __getitem__(self, name: str) -> int:
        return self._indices[name]

    def add(self, name: str, index: int) -> None:
        """Record the index of an operation's fastest implementation, and rewrite the JSON file.

        `name` identifies the operation and its shapes.
        """
        # Read the file again, because another process may have added choices.
        self._indices = {**self._read(), **self._indices, name: index}
        write_cached(self._path, json.dumps(self._indices).encode())

    def _read(self) -> dict[str, int]:
        with suppress(OSError, ValueError):
            content = json.loads(self._path.read_bytes())
            if isinstance(content, dict):
                return content
        return {}


@functools.cache
def _choices_of(device: int) -> Choices:
    """Return the record of fastest implementations for a GPU. GPUs of one model share a record."""
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    versions = torch.__version__, torch.version.cuda, cudnn, torch.cuda.get_device_name(device)
    digest = hashlib.sha256(repr(versions).encode()).hexdigest()
    return Choices(cache_folder("fastest") / f"{digest}.json")


def _milliseconds(run: Callable[[], object]) -> float:
    """Return the GPU time of `_RUNS` calls of `run` in ms, or infinity if `run` fails."""
    current, stream = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        # Runs are replayed from a CUDA graph, because launches take longer than short kernels.
        graph = torch.cuda.CUDAGraph()
        try:
            run()  # a first run compiles and loads kernels
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for _ in range(_RUNS):
                    run()
            finally:
                graph.capture_end()
        except (UnsupportedError, RuntimeError):  # RuntimeError: for example, out of memory
            stream.synchronize()  # the caller may free the memory that `run` uses
            return float("inf")
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
