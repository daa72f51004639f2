"""Triton kernel of `maskrcnn::upsampled_class_logits`."""

import torch
import triton
from torch import Tensor
from triton import language as tl

from ..fused_convolution.pointwise_kernel import descriptor
from ..runtime.arguments import HALF_TYPES, aligned

# Number of input cells that a thread block computes at a time, and pipeline stages: number of such
# groups of cells that are in shared memory at once.
_CELLS_AT_ONCE, _STAGES = 64, 3
_WARPS = 4
# Smallest and largest number of channels of the convolution's input and output.
_MIN_CHANNELS, _MAX_CHANNELS = 64, 256
# Compute capability of the GPUs (H100, H200) on which the kernel was measured to be faster than
# separate ones. On others, it can lack shared memory or registers.
_MEASURED_CAPABILITY = (9, 0)


def is_supported(features: Tensor, outputs: int) -> bool:
    """Return whether to use `launch_upsampled_class_logits` for `features` [R, C, H, W] on a GPU.

    The launch supports certain numbers of channels, and is fast on certain GPUs. `outputs` is the
    number of output channels of the transposed convolution.
    """
    channels, rows, columns = features.shape[1:]
    suits = all(
        _MIN_CHANNELS <= size <= _MAX_CHANNELS and size & (size - 1) == 0
        for size in (channels, outputs)
    )
    # Cells that are computed together then belong to at most two instances.
    has_enough_cells = rows * columns >= _CELLS_AT_ONCE
    if features.dtype not in HALF_TYPES or not suits or not has_enough_cells:
        return False
    return torch.cuda.get_device_capability(features.device) == _MEASURED_CAPABILITY


def launch_upsampled_class_logits(
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    class_weight: Tensor,
    class_bias: Tensor,
    labels: Tensor,
    logits: Tensor,
) -> None:
    """Queue the Triton kernel of `upsampled_class_logits`.

    The kernel writes its result to `logits`, which must be contiguous. The other arguments are
    those of `upsampled_class_logits`. `is_supported` must be true.
    """
    instances, channels, rows, columns = features.shape
    outputs, parts = len(bias), len(weight) ** 2
    cells = aligned(features.permute(0, 2, 3, 1)).flatten(0, 2)
    multiprocessors = torch.cuda.get_device_properties(features.device).multi_processor_count
    blocks = max(1, min(multiprocessors // parts, triton.cdiv(len(cells), _CELLS_AT_ONCE)))
    _upsampled_class_logits[(blocks * parts,)](
        descriptor(cells, (_CELLS_AT_ONCE, channels)),
        descriptor(aligned(weight).flatten(0, 2), (outputs, channels)),
        bias.contiguous(),
        class_weight.contiguous(),
        class_bias.contiguous(),
        labels.contiguous(),
        logits,
        blocks,
        instances,
        ROWS=rows,
        COLUMNS=columns,
        OUTPUTS=outputs,
        BLOCK_M=_CELLS_AT_ONCE,
        STAGES=_STAGES,
        num_warps=_WARPS,
    )


@triton.jit(do_not_specialize=["blocks", "instances"])  # type: ignore[untyped-decorator]
def _upsampled_class_logits(  # type: ignore[no-untyped-def]
    features,
    weight,
    bias,
    class_weight,
    class_bias,
    labels,
    logits,
    blocks,
    instances,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute the logits of `upsampled_class_logits`.

    Each thread block computes one of the 2x2 output cells, for many groups of BLOCK_M input cells.
    Meanwhile it keeps the weight of this output cell in shared memory. The groups are divided among
    `blocks` thread blocks per output cell. The convolution's result stays in registers.
    """
    CELLS: tl.constexpr = ROWS * COLUMNS
    part = tl.program_id(0) % 4
    channel = tl.arange(0, OUTPUTS)
    b = weight.load([part * OUTPUTS, 0]).T
    offset = tl.load(bias + channel)[None, :]
    groups = tl.cdiv(instances * CELLS, BLOCK_M)
    for group in tl.range(tl.program_id(0) // 4, groups, blocks, num_stages=STAGES):
        first_cell = group * BLOCK_M
        index = first_cell + tl.arange(0, BLOCK_M)
        instance = index // CELLS
        # The group's cells belong to the instance `first`, or to the instances `first` and `last`.
        first = first_cell // CELLS
        last = tl.minimum((first_cell + BLOCK_M - 1) // CELLS, instances - 1)
        a = features.load([first_cell, 0])
        output = tl.maximum(tl.dot(a, b) + offset, 0.0)
        label = tl.load(labels + first)
        factors = tl.load(class_weight + label * OUTPUTS + channel)
        sums = tl.sum(output * factors[None, :], 1) + tl.load(class_bias + label)
        if last != first:
            label = tl.load(labels + last)
            factors = tl.load(class_weight + label * OUTPUTS + channel)
            others = tl.sum(output * factors[None, :], 1) + tl.load(class_bias + label)
            sums = tl.where(instance == first, sums, others)
        row = 2 * (index % CELLS // COLUMNS) + part // 2
        column = 2 * (index % COLUMNS) + part % 2
        target = (instance.to(tl.int64) * 2 * ROWS + row) * 2 * COLUMNS + column
        tl.store(logits + target, sums.to(logits.dtype.element_ty), mask=instance < instances)
