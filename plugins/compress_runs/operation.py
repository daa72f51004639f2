"""`maskrcnn::compress_runs`: compression of run lengths to COCO RLE strings.

Contract of all implementations: each string is the compressed `counts` of COCO RLE. Run lengths
and strings are tensors with one row per mask. The rest of a row, after the last run or character
of the mask, is padding.
"""

import torch
from torch import Tensor

from ..run_lengths import strings_from_runs
from ..runtime.arguments import kernel_argument
from ..runtime.launching import launch_kernel
from .kernel import COMPRESS_RUNS, compress_runs_launch


@torch.library.custom_op("maskrcnn::compress_runs", mutates_args=(), device_types="cpu")
def compress_runs(counts: Tensor, num_runs: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Compress the run lengths of masks to COCO RLE strings.

    Args:
        counts: [N, C] int32, up to C run lengths of each of N masks. The first run of a mask is
            background.
        num_runs: [N] int32, number of runs of each mask. If it exceeds C, the mask's result is
            undefined.
        capacity: maximum number of characters per mask.

    Returns:
        text [N, capacity] uint8, one string per row, undefined after its end; and the lengths of
        the strings, [N] int32. A length above the capacity means that the string is cut off.
    """
    text, lengths = _empty_text(counts, capacity)
    # More runs than C must not be an error, because the CUDA kernel cannot raise one either.
    num_runs = num_runs.clamp(max=counts.shape[1])
    runs = counts[torch.arange(counts.shape[1]) < num_runs[:, None]]
    for row, string in enumerate(strings_from_runs(runs.numpy(), num_runs.numpy())):
        lengths[row] = len(string)
        text[row, : len(string)] = torch.tensor(list(string[:capacity]), dtype=torch.uint8)
    return text, lengths


@compress_runs.register_fake
def _(counts: Tensor, num_runs: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    return _empty_text(counts, capacity)


@compress_runs.register_kernel("cuda")
def _(counts: Tensor, num_runs: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    counts = kernel_argument("counts", counts, torch.int32, (-1, -1))
    num_runs = kernel_argument("num_runs", num_runs, torch.int32, (counts.shape[0],))
    text, lengths = _empty_text(counts, capacity)
    launch = compress_runs_launch(counts.shape[0], counts.shape[1], capacity)
    launch_kernel(COMPRESS_RUNS, launch, [counts, num_runs], [text, lengths])
    return text, lengths


def _empty_text(counts: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    masks = counts.shape[0]
    text = counts.new_empty(masks, capacity, dtype=torch.uint8)
    return text, counts.new_empty(masks, dtype=torch.int32)
