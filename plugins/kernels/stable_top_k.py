"""Compilation and launch of the kernels in `stable_top_k.cu`."""

from ..compilation import Kernel, Launch

MAX_K = 4096
"""Entries that a block sorts; to choose more, sorting whole rows was measured to be faster."""
CHUNK = 16384
"""Entries of a row that a block takes."""

_THREADS = 1024


def survivors(count: int, k: int) -> int:
    """Entries that pruning leaves of a row's `count`."""
    full = (count - 1) // CHUNK
    return full * k + min(k, count - full * CHUNK)


def prune_kernel(value_type: str, count: int) -> Kernel:
    """The kernel that leaves k entries a chunk of `float`, `float16` or `bfloat16` values."""
    return _kernel("prune_top_k", value_type, min(count, CHUNK))


def prune_launch(rows: int, stride: int, count: int, k: int) -> Launch:
    """Launch for values [R, N] and candidates [R, M] int32 -> survivors [R, survivors(M, k)].

    Values lie `stride` apart from row to row. Candidates and survivors are ascending indices into
    a row; none stand for all.
    """
    chunks = -(-count // CHUNK)
    scalars = (stride, count, k, survivors(count, k))
    return Launch((rows, chunks, 1), (_THREADS, 1, 1), scalars)


def sort_kernel(value_type: str, count: int) -> Kernel:
    """The kernel that chooses and sorts, of at most a chunk's entries at most `MAX_K`."""
    return _kernel("sort_top_k", value_type, count)


def sort_launch(rows: int, stride: int, count: int, k: int) -> Launch:
    """Launch for values [R, N], candidates [R, M] int32 -> largest [R, K], indices [R, K] int64."""
    return Launch((rows, 1, 1), (_THREADS, 1, 1), (stride, count, k))


def _kernel(name: str, value_type: str, count: int) -> Kernel:
    constants = (
        ("VALUE", value_type),
        # A power of two, so that few kernels serve all sizes.
        ("ITEMS", 1 << (-(-count // _THREADS) - 1).bit_length()),
        ("MAX_K", MAX_K),
        ("THREADS", _THREADS),
    )
    return Kernel("stable_top_k.cu", name, constants)


VARIANTS = (
    *(sort_kernel("float", _THREADS * items) for items in (1, 2, 4, 8, 16)),
    prune_kernel("float", CHUNK),
    *(sort_kernel(value_type, _THREADS) for value_type in ("float16", "bfloat16")),
)
