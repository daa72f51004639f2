"""`maskrcnn::compress_runs`: run lengths of masks as the strings of COCO's encoding.

Contract, held by every implementation: that of `run_lengths.strings_from_runs`, a row a mask.
"""

import torch
from torch import Tensor

from .arguments import kernel_argument
from .kernels.compress_runs import compress_runs_kernel, compress_runs_launch
from .launching import launch_kernel
from .run_lengths import strings_from_runs


@torch.library.custom_op("maskrcnn::compress_runs", mutates_args=(), device_types="cpu")
def compress_runs(counts: Tensor, num_runs: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Compress the run lengths of masks.

    Args:
        counts: [N, C] int32, run lengths, zeros first.
        num_runs: [N] int32, how many of each row are meant; where they are more than C, what
            comes of the row is of no use.
        capacity: characters of a mask that there is room for.

    Returns:
        Text [N, capacity] uint8, of which anything may follow a string, and the lengths of the
        strings [N] int32, which count those characters too that found no room.

    Raises:
        ValueError: on a GPU, an argument has another dtype or shape.
    """
    text, lengths = _empty_text(counts, capacity)
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
    launch_kernel(compress_runs_kernel(), launch, [counts, num_runs], [text, lengths])
    return text, lengths


def _empty_text(counts: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    masks = counts.shape[0]
    text = counts.new_empty(masks, capacity, dtype=torch.uint8)
    return text, counts.new_empty(masks, dtype=torch.int32)
