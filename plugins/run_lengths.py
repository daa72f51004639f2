"""COCO's compressed run lengths. Needs no torch."""

import numpy as np
from numpy.typing import NDArray

_GROUP_LIMITS = tuple(1 << (5 * groups - 1) for groups in range(1, 7))
"""Numbers from these on take one more group of five bits, of which one is the sign."""


def coco_strings(counts: NDArray[np.int32], num_runs: NDArray[np.int32]) -> list[bytes]:
    """Compress the run lengths of many masks, a row each.

    Args:
        counts: [N, C] run lengths, zeros first.
        num_runs: [N], how many of each row are meant.

    Returns:
        The `counts` of COCO's encoding, one a mask.

    Raises:
        ValueError: a mask has more runs than there was room for.
    """
    longest = int(num_runs.max(initial=0))
    if longest > counts.shape[1]:
        raise ValueError(
            f"a mask has {longest} runs, but there was room for {counts.shape[1]}: raise the "
            "capacity"
        )
    runs = counts[:, :longest][np.arange(longest) < num_runs[:, None]]
    return strings_from_runs(runs, num_runs)


def strings_from_runs(
    runs: NDArray[np.signedinteger], num_runs: NDArray[np.signedinteger]
) -> list[bytes]:
    """Compress the run lengths of many masks, one after another.

    From the fourth on, a length is replaced by its difference to the last one of the same value.
    Each number is written in groups of five bits, lowest first, with a sixth bit where more
    follow; 48 added makes such a group a printable character.

    Args:
        runs: [sum of num_runs] run lengths below 2 ** 31, zeros of each mask first.
        num_runs: [N], how many each mask has.

    Returns:
        The `counts` of COCO's encoding, one a mask.
    """
    first_runs = np.cumsum(num_runs) - num_runs
    values = runs.copy()
    values[2:] -= runs[:-2]
    for place in range(3):
        early = first_runs[num_runs > place] + place
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
    values: NDArray[np.signedinteger], places: NDArray[np.int64], lengths: NDArray[np.int64]
) -> bytes:
    """Numbers written into their places, each in so many characters."""
    text = np.empty(lengths.sum(), np.uint8)
    while len(values):
        more = lengths > 1
        text[places] = (values & 0x1F) + 0x20 * more + 48
        values, places, lengths = values[more] >> 5, places[more] + 1, lengths[more] - 1
    return text.tobytes()
