"""Compilation and launch of the kernels in `stable_top_k.cu`."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from ..runtime.compilation import Kernel, Launch

# Maximum number of parts of a row. A part is, for example, the scores of one pyramid level.
MAX_PARTS = 5
# Largest k of the kernels: one block sorts k entries. For a larger k, sorting whole rows is faster.
MAX_K = 4096
# Entries of a row that one block reads.
CHUNK = 16384

# Threads per block.
_THREADS = 1024


def survivors(count: int, k: int) -> int:
    """Return how many of `count` entries are left after one launch of `prune_kernel`.

    The kernel keeps the k largest entries of each chunk of `CHUNK` entries.
    """
    full = (count - 1) // CHUNK
    return full * k + min(k, count - full * CHUNK)


class Part(NamedTuple):
    """Range of entries in a row. The k largest entries of each part are selected."""

    # Index of the first entry.
    first: int
    # Number of candidates: at first all entries of the range, after pruning those that are left.
    length: int


def prune_kernel(value_type: str, parts: Sequence[Part]) -> Kernel:
    """Return the kernel that removes entries that cannot be among the k largest of a part.

    A part of a row is, for example, the scores of one pyramid level. It is cut into chunks of up to
    `CHUNK` entries. The kernel keeps the k largest entries of each chunk; `prune_launch` sets k.
    Launch the kernel repeatedly until the remaining entries of each part fit into one chunk, as
    `sort_kernel` requires.

    Args:
        value_type: `float`, `float16` or `bfloat16`.
        parts: Parts of a row.
    """
    return _kernel("prune_top_k", value_type, min(longest(parts), CHUNK), len(parts))


def prune_launch(rows: int, stride: int, parts: Sequence[Part], k: int) -> Launch:
    """Return the grid, block and scalar arguments of `prune_kernel` for L parts of each row.

    The kernel divides the candidates of a part into chunks of `CHUNK`, and keeps the k largest of
    each chunk. Its inputs and output are:

    - Values [rows, N]: the rows are `stride` elements apart.
    - Candidates [rows, L, C] int64: C is the largest number of candidates of a part. The high 32
      bits of a candidate are its index in the row of values. The low 32 bits are an unsigned key: a
      larger value has a larger key. A part's candidates are in the order of their indices. If the
      tensor of candidates is empty, all entries of a part are candidates.
    - Output [rows, L, survivors(C, k)] int64: the kept candidates, with index and key as above.
    """
    count = longest(parts)
    scalars = (stride, count, *chain(*parts), k, survivors(count, k))
    return Launch((rows * len(parts), -(-count // CHUNK), 1), (_THREADS, 1, 1), scalars)


def sort_kernel(value_type: str, parts: Sequence[Part]) -> Kernel:
    """Return the kernel that sorts the k largest candidates of each part of a row.

    A part of a row is, for example, the scores of one pyramid level. It has at most `CHUNK`
    candidates. `sort_launch` sets k, which is at most `MAX_K`.
    """
    return _kernel("sort_top_k", value_type, longest(parts), len(parts))


def sort_launch(rows: int, stride: int, parts: Sequence[Part], k: int) -> Launch:
    """Return the grid, block and scalar arguments of `sort_kernel` for L parts.

    Inputs are values [rows, N], whose rows are `stride` elements apart, and candidates
    [rows, L, C] int64, which `prune_launch` explains. Outputs are the k largest candidates' values
    [rows, L, k] and indices in the row [rows, L, k] int64. If a part has fewer than k entries, its
    values are padded with negative infinity and its indices with -1.
    """
    scalars = (stride, longest(parts), *chain(*parts), k)
    return Launch((rows * len(parts), 1, 1), (_THREADS, 1, 1), scalars)


def longest(parts: Sequence[Part]) -> int:
    """Return the largest number of candidates (`Part.length`) of any part."""
    return max(part.length for part in parts)


def _kernel(name: str, value_type: str, count: int, parts: int) -> Kernel:
    constants = (
        ("VALUE", value_type),
        # A power of two, so that few kernels cover all sizes.
        ("ITEMS", 1 << (-(-count // _THREADS) - 1).bit_length()),
        ("LEVELS", parts),
        ("MAX_K", MAX_K),
        ("THREADS", _THREADS),
    )
    return Kernel("stable_top_k/stable_top_k.cu", name, constants)


def _prebuilt(count: int, parts: int = 1) -> list[Part]:
    return [Part(0, count)] * parts


PREBUILT_KERNELS = (
    *(sort_kernel("float", _prebuilt(_THREADS * items)) for items in (1, 2, 4, 8, 16)),
    prune_kernel("float", _prebuilt(CHUNK)),
    *(sort_kernel("float", _prebuilt(_THREADS * items, MAX_PARTS)) for items in (4, 16)),
    prune_kernel("float", _prebuilt(CHUNK, MAX_PARTS)),
    *(sort_kernel(value_type, _prebuilt(_THREADS)) for value_type in ("float16", "bfloat16")),
)
