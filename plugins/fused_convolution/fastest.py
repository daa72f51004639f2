"""Choice of the fastest of several implementations, by measuring them on the GPU."""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from .libraries import UnsupportedError

# Runs of an implementation that are timed together.
_RUNS = 5
# An earlier implementation is preferred to one that is faster by less than this factor.
_TOLERANCE = 1.03

# Index of the chosen implementation, by the key of the operation.
_choices: dict[Hashable, int] = {}


def run_fastest(key: Hashable, implementations: Sequence[Callable[[], Tensor]]) -> Tensor:
    """Run the fastest implementation of an operation in the current stream.

    The first call with a key measures all implementations. This is not possible while a CUDA graph
    is captured: if the key is new then, the first implementation runs.

    Args:
        key: what the durations depend on: GPU, types, shapes and options.
        implementations: functions that queue the operation and return the output.

    Raises:
        UnsupportedError: no implementation is supported.
    """
    if key not in _choices and not torch.cuda.is_current_stream_capturing():
        durations = [_milliseconds(implementation) for implementation in implementations]
        limit = _TOLERANCE * min(durations)
        _choices[key] = next(i for i, duration in enumerate(durations) if duration <= limit)
    return implementations[_choices.get(key, 0)]()


def _milliseconds(run: Callable[[], Tensor]) -> float:
    """Return how long `_RUNS` runs take, infinity if the implementation is unsupported."""
    current, stream = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        try:
            run()  # a first run compiles and loads kernels
        except UnsupportedError:
            return float("inf")
        # Runs are replayed from a CUDA graph, because launches take longer than short kernels.
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(_RUNS):
            run()
        graph.capture_end()
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
