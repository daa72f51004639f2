"""Compilation and launch of `compress_runs.cu`."""

from ..runtime.compilation import Kernel, Launch

# Threads per block.
_THREADS = 128


COMPRESS_RUNS = Kernel("compress_runs/compress_runs.cu", "compress_runs", (("THREADS", _THREADS),))


def compress_runs_launch(masks: int, runs_capacity: int, capacity: int) -> Launch:
    """Return the grid, block and scalar arguments of the kernel `COMPRESS_RUNS`.

    The rows of the tensors have room for `runs_capacity` runs and `capacity` characters per mask.
    Inputs are the run lengths [masks, runs_capacity] int32 and the number of runs of each mask
    [masks] int32. Outputs are the COCO RLE characters [masks, capacity] uint8 and the length of
    each mask's string [masks] int32.
    """
    return Launch((masks, 1, 1), (_THREADS, 1, 1), (runs_capacity, capacity))


PREBUILT_KERNELS = (COMPRESS_RUNS,)
