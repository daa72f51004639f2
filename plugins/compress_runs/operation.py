"""Compression of run lengths to COCO RLE strings.

Specification of all implementations: each string is the compressed `counts` of COCO RLE. One text
buffer holds the strings of all masks without gaps, in any order.
"""

import torch
from torch import Tensor

from ..run_lengths import strings_from_runs
from ..runtime.arguments import kernel_argument
from ..runtime.launching import launch_kernel
from .kernel import COMPRESS_RUNS, compress_runs_launch


def compress_runs(counts: Tensor, num_runs: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Compress the run lengths of masks to COCO RLE strings.

    Args:
        counts: [N, C] int32, up to C run lengths of each of N masks. The first run of a mask is
            background.
        num_runs: [N] int32, number of runs of each mask.
        capacity: maximum number of characters of all masks together.

    Returns:
        text [capacity] uint8, undefined after the last string; and [N, 2] int64, start and length
        of each mask's string in the text. Characters beyond the capacity are missing in the text,
        but counted in the lengths. If a mask has more than C runs, it has no string: its length is
        -1, and its start undefined.

    Raises:
        ValueError: on a GPU, an argument has another dtype or shape than documented.
    """
    text = counts.new_empty(capacity, dtype=torch.uint8)
    if counts.is_cuda:
        counts = kernel_argument("counts", counts, torch.int32, (-1, -1))
        num_runs = kernel_argument("num_runs", num_runs, torch.int32, (counts.shape[0],))
        spans = counts.new_zeros(counts.shape[0] + 1, 2, dtype=torch.int64)
        launch = compress_runs_launch(counts.shape[0], counts.shape[1], capacity)
        launch_kernel(COMPRESS_RUNS, launch, [counts, num_runs], [text, spans])
        return text, spans[:-1]
    fits = num_runs <= counts.shape[1]
    num_runs = num_runs.where(fits, 0)
    runs = counts[torch.arange(counts.shape[1]) < num_runs[:, None]]
    strings = strings_from_runs(runs.numpy(), num_runs.numpy())
    characters = torch.tensor(list(b"".join(strings)[:capacity]), dtype=torch.uint8)
    text[: len(characters)] = characters
    lengths = torch.tensor(list(map(len, strings)), dtype=torch.int64)
    starts = lengths.cumsum(0) - lengths
    return text, torch.stack([starts, lengths.where(fits, -1)], dim=1)
