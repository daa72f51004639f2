"""Compression of run lengths to COCO RLE strings, without torch."""

import numpy as np
from numpy.typing import NDArray

# Smallest magnitudes that need 2 to 7 groups of five bits. One bit of a number is its sign.
_GROUP_LIMITS = tuple(1 << (5 * groups - 1) for groups in range(1, 7))


def coco_strings(counts: NDArray[np.int32], num_runs: NDArray[np.int32]) -> list[bytes]:
    """Compress the run lengths of many masks, one row per mask.

    Args:
        counts: [N, C], up to C run lengths of each of N masks. A mask's first run is background.
        num_runs: [N], number of valid runs of each row.

    Returns:
        The compressed `counts` of COCO RLE, one string per mask.

    Raises:
        ValueError: a mask has more runs than C.
    """
    longest = int(num_runs.max(initial=0))
    if longest > counts.shape[1]:
        raise ValueError(
            f"a mask has {longest} runs, but `counts` has room for {counts.shape[1]} per mask; "
            "compute the run lengths again with a larger capacity"
        )
    runs = counts[:, :longest][np.arange(longest) < num_runs[:, None]]
    return strings_from_runs(runs, num_runs)


def strings_from_runs(
    runs: NDArray[np.signedinteger], num_runs: NDArray[np.signedinteger]
) -> list[bytes]:
    """Compress the concatenated run lengths of many masks.

    Args:
        runs: [sum of num_runs], run lengths below 2 ** 31. A mask's first run is background.
        num_runs: [N], number of runs of each of N masks.

    Returns:
        The compressed `counts` of COCO RLE, one string per mask.
    """
    # COCO's encoding: from the mask's fourth run on, a length is replaced by its difference from
    # the length two runs before. Numbers are split into groups of five bits, lowest first. A sixth
    # bit is set if more groups follow, and adding 48 makes the group a printable character.
    first_runs = np.cumsum(num_runs) - num_runs
    values = runs.copy()
    values[2:] -= runs[:-2]
    for index in range(3):
        early = first_runs[num_runs > index] + index
        values[early] = runs[early]
    magnitudes = values ^ (values >> 31)
    lengths = np.ones(len(values), np.int64)
    for limit in _GROUP_LIMITS:
        lengths += magnitudes >= limit
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    text = _text_from_values(values, bounds[:-1], lengths)
    starts, ends = bounds[first_runs], bounds[first_runs + num_runs]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)]


def _text_from_values(
    values: NDArray[np.signedinteger], positions: NDArray[np.int64], lengths: NDArray[np.int64]
) -> bytes:
    """Encode numbers as COCO RLE does: groups of five bits, lowest first, one character per group.

    Args:
        values: [V] signed numbers.
        positions: [V], index of each number's first character in the returned text.
        lengths: [V], number of characters of each number.

    Returns:
        ASCII text of all numbers, with one byte per character.
    """
    text = np.empty(lengths.sum(), np.uint8)
    while len(values):
        more = lengths > 1
        text[positions] = (values & 0x1F) + 0x20 * more + 48
        values, positions, lengths = values[more] >> 5, positions[more] + 1, lengths[more] - 1
    return text.tobytes()
