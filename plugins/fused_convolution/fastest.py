"""Choice of the fastest of several implementations, by measuring them on the GPU."""

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from .libraries import UnsupportedError

# Runs of an implementation that are timed together.
_RUNS = 5
# An earlier implementation is preferred to one that is faster by less than this factor.
_TOLERANCE = 1.03

# Index of the chosen implementation, by the key of the operation.
_choices: dict[Hashable, int] = {}
# Only one thread measures at a time.
_measuring = threading.Lock()


def run_fastest(key: Hashable, implementations: Sequence[Callable[[], Tensor]]) -> Tensor:
    """Run the fastest implementation of an operation in the current stream.

    The first call with a key measures all implementations. If a CUDA graph is being captured, they
    cannot be measured: if the key is new, this call runs the first supported implementation. The
    GPU of the operation must be current.

    Args:
        key: all properties that affect the durations: GPU, dtypes, shapes and options.
        implementations: functions that queue the operation and return the output.

    Raises:
        UnsupportedError: no implementation is supported.
    """
    if not torch.cuda.is_current_stream_capturing():
        with _measuring:
            if key not in _choices:
                durations = [_milliseconds(implementation) for implementation in implementations]
                limit = _TOLERANCE * min(durations)
                _choices[key] = next(i for i, duration in enumerate(durations) if duration <= limit)
    if key in _choices:
        return implementations[_choices[key]]()
    for implementation in implementations:
        with suppress(UnsupportedError):
            return implementation()
    raise UnsupportedError(f"no implementation supports {key}")


def _milliseconds(run: Callable[[], Tensor]) -> float:
    """Return the duration of `_RUNS` runs in milliseconds. Infinity: the implementation failed."""
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
        except (UnsupportedError, RuntimeError):  # such as a lack of memory
            return float("inf")
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
