"""CUDA graphs of repeated launches, captured and replayed through CUDA's driver library."""

import ctypes
import logging
from collections.abc import Callable, Hashable
from typing import Any

from ..errors import BackendError

_log = logging.getLogger(__name__)

# CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other threads may allocate and copy during a capture.
_THREAD_LOCAL = 1


class LaunchGraphs:
    """Cache of CUDA graphs by key. A graph replays the GPU work that was queued for its key.

    The first `launch` with a key first runs the work without a graph, because libraries then load
    their code, and loading cannot be captured. Then it captures the work, without running it, as
    the graph that later launches replay. If a capture fails, a warning is logged, and from then on
    no more graphs are captured: work that has no graph yet always runs without one.
    """

    def __init__(self) -> None:
        """Load CUDA's driver library, `libcuda.so.1`, which must be installed."""
        # Called through ctypes, because pycuda has no functions for graphs.
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._graphs: dict[Hashable, ctypes.c_void_p] = {}
        self._captures = True

    def launch(self, key: Hashable, stream: int, queue: Callable[[], None]) -> None:
        """Queue work on a stream: replay the graph of `key` if there is one, else call `queue`.

        Call this method from one thread at a time. The CUDA context must be current.

        Args:
            key: Key that identifies the work with all its shapes and addresses.
            stream: Handle of the stream, which must not be the default stream.
            queue: Function that queues the work on the stream.

        Raises:
            BackendError: `queue` or CUDA fails.
        """
        if key in self._graphs:
            self._call("cuGraphLaunch", self._graphs[key], ctypes.c_void_p(stream))
            return
        queue()
        if not self._captures:
            return
        try:
            self._graphs[key] = self._captured(ctypes.c_void_p(stream), queue)
        except BackendError as error:
            self._captures = False
            # As text: a log record that holds the error would keep TensorRT's objects alive.
            reason = str(error)
            _log.warning("batches are launched without CUDA graphs, which is slower: %s", reason)

    def close(self) -> None:
        """Release the graphs. No graph may be in flight. The CUDA context must be current."""
        while self._graphs:
            self._call("cuGraphExecDestroy", self._graphs.popitem()[1])

    def _captured(self, stream: ctypes.c_void_p, queue: Callable[[], None]) -> ctypes.c_void_p:
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamBeginCapture_v2", stream, _THREAD_LOCAL)
        try:
            try:
                queue()
            finally:  # a failed launch must not leave the stream in capture
                self._call("cuStreamEndCapture", stream, ctypes.byref(graph))
            arguments = ctypes.byref(executable), graph, ctypes.c_ulonglong(0)
            self._call("cuGraphInstantiateWithFlags", *arguments)
        finally:
            if graph:
                self._call("cuGraphDestroy", graph)
        return executable

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(text))
            reason = text.value.decode() if text.value else f"status {status}"
            raise BackendError(f"the CUDA driver call {name} failed: {reason}")
