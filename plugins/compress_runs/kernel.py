"""Compilation and launch of `compress_runs.cu`."""

from ..runtime.compilation import Kernel, Launch

# Threads per block.
_THREADS = 128


COMPRESS_RUNS = Kernel("compress_runs/compress_runs.cu", "compress_runs", (("THREADS", _THREADS),))


def compress_runs_launch(masks: int, runs_capacity: int, capacity: int) -> Launch:
    """Return the grid, block and scalar arguments of the kernel `COMPRESS_RUNS`.

    Inputs are the run lengths [masks, runs_capacity] int32 and the number of runs of each mask
    [masks] int32. Outputs are the COCO RLE characters of all masks [capacity] uint8, and a table
    [masks + 1, 2] int64, which must be zero before the launch. A mask's row of the table receives
    the start and the length of the mask's string. If the mask has more runs than `runs_capacity`,
    the length is -1. The last row receives the total length of the strings, then 0.
    """
    return Launch((masks, 1, 1), (_THREADS, 1, 1), (runs_capacity, capacity))


PREBUILT_KERNELS = (COMPRESS_RUNS,)
