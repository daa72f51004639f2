"""COCO's compressed run lengths. Needs no torch."""

import numpy as np
from numpy.typing import NDArray


def coco_strings(counts: NDArray[np.int32], num_runs: NDArray[np.int32]) -> list[bytes]:
    """Compress the run lengths of many masks at once.

    From the fourth on, a length is replaced by its difference to the last one of the same value.
    Each number is written in groups of five bits, lowest first and signed, with a sixth bit where
    more follow; 48 makes such a group a printable character.

    Args:
        counts: [N, C] run lengths, zeros first.
        num_runs: [N], how many of each row are meant.

    Raises:
        ValueError: a mask has more runs than there was room for.
    """
    longest = int(num_runs.max(initial=0))
    if longest > counts.shape[1]:
        raise ValueError(
            f"a mask has {longest} runs, but there was room for {counts.shape[1]}; raise the "
            "capacity"
        )
    values = counts[:, :longest].astype(np.int32)
    values[:, 3:] -= counts[:, 1 : max(longest - 2, 1)]
    rest = values[np.arange(longest) < num_runs[:, None]]
    characters = np.zeros((len(rest), 7), np.uint8)
    lengths = np.zeros(len(rest), np.int64)
    unfinished = np.arange(len(rest))
    while len(unfinished):
        low = rest & 0x1F
        rest = rest >> 5
        more = rest != np.where(low & 0x10, -1, 0)
        characters[unfinished, lengths[unfinished]] = low + 0x20 * more + 48
        lengths[unfinished] += 1
        unfinished, rest = unfinished[more], rest[more]
    text = characters[characters != 0].tobytes()
    ends = np.concatenate([[0], np.cumsum(lengths)])[np.concatenate([[0], np.cumsum(num_runs)])]
    return [text[start:end] for start, end in zip(ends[:-1], ends[1:], strict=True)]
