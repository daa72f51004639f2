"""Compilation and launch of `compress_runs.cu`."""

from ..compilation import Kernel, Launch

_THREADS = 128


def compress_runs_kernel() -> Kernel:
    """The only kernel there is."""
    return Kernel("compress_runs.cu", "compress_runs", (("THREADS", _THREADS),))


def compress_runs_launch(masks: int, runs_capacity: int, capacity: int) -> Launch:
    """Launch for counts [N, C] and num_runs [N], both int32.

    Its outputs are text [N, capacity] uint8 and lengths [N] int32.
    """
    return Launch((masks, 1, 1), (_THREADS, 1, 1), (runs_capacity, capacity))


VARIANTS = (compress_runs_kernel(),)
