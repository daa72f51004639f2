"""Compilation and launch of the kernels in `stable_top_k.cu`."""

from ..runtime.compilation import Kernel, Launch

# Largest k of the kernels: one block sorts k entries. For a larger k, sorting whole rows is faster.
MAX_K = 4096
# Entries of a row that one block reads.
CHUNK = 16384

# Threads per block.
_THREADS = 1024


def survivors(count: int, k: int) -> int:
    """Return how many of a row's `count` entries remain after one launch of `prune_kernel`."""
    full = (count - 1) // CHUNK
    return full * k + min(k, count - full * CHUNK)


def prune_kernel(value_type: str, count: int) -> Kernel:
    """Return the kernel that keeps the k largest entries of each chunk of a row.

    A row has `count` entries, and a chunk has up to `CHUNK` of them. The value type is `float`,
    `float16` or `bfloat16`.
    """
    return _kernel("prune_top_k", value_type, min(count, CHUNK))


def prune_launch(rows: int, stride: int, count: int, k: int) -> Launch:
    """Return the grid, block and scalar arguments of `prune_kernel`.

    Inputs are values [rows, N], whose rows are `stride` elements apart, and candidates
    [rows, count] int32, ascending indices into a row. If candidates is empty, all entries of a row
    are candidates. The output is the indices of the remaining candidates, ascending,
    [rows, survivors(count, k)] int32.
    """
    chunks = -(-count // CHUNK)
    scalars = (stride, count, k, survivors(count, k))
    return Launch((rows, chunks, 1), (_THREADS, 1, 1), scalars)


def sort_kernel(value_type: str, count: int) -> Kernel:
    """Return the kernel that sorts the k <= `MAX_K` largest of `count` <= `CHUNK` entries."""
    return _kernel("sort_top_k", value_type, count)


def sort_launch(rows: int, stride: int, count: int, k: int) -> Launch:
    """Return the grid, block and scalar arguments of `sort_kernel`.

    Inputs are values [rows, N], whose rows are `stride` elements apart, and candidates
    [rows, count] int32, as in `prune_launch`. Outputs are the k largest candidates' values
    [rows, k] and indices [rows, k] int64.
    """
    return Launch((rows, 1, 1), (_THREADS, 1, 1), (stride, count, k))


def _kernel(name: str, value_type: str, count: int) -> Kernel:
    constants = (
        ("VALUE", value_type),
        # A power of two, so that few kernels cover all sizes.
        ("ITEMS", 1 << (-(-count // _THREADS) - 1).bit_length()),
        ("MAX_K", MAX_K),
        ("THREADS", _THREADS),
    )
    return Kernel("stable_top_k/stable_top_k.cu", name, constants)


PREBUILT_KERNELS = (
    *(sort_kernel("float", _THREADS * items) for items in (1, 2, 4, 8, 16)),
    prune_kernel("float", CHUNK),
    *(sort_kernel(value_type, _THREADS) for value_type in ("float16", "bfloat16")),
)
