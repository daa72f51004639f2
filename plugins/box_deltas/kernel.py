"""Compilation and launch of `encode_boxes.cu` and `decode_boxes.cu`."""

import math

from ..runtime.compilation import Kernel, Launch

# Natural logarithm of the largest factor by which decoding enlarges a reference: 1000 / 16, as in
# Detectron.
MAX_LOG_SCALE = math.log(1000 / 16)
# Threads per block.
_THREADS = 256


def encode_boxes_kernel(center_weight: float, size_weight: float) -> Kernel:
    """Return the kernel that encodes boxes as deltas.

    `center_weight` is the factor of dx and dy. `size_weight` is the factor of dw and dh.
    """
    return Kernel(
        "box_deltas/encode_boxes.cu", "encode_boxes", _weights(center_weight, size_weight)
    )


def encode_boxes_launch(count: int) -> Launch:
    """Return the grid, block and scalar arguments of `encode_boxes_kernel`.

    Inputs are boxes [count, 4] and references [count, 4]. The output is deltas [count, 4]. All are
    float32.
    """
    return Launch((-(-count // _THREADS), 1, 1), (_THREADS, 1, 1), (count,))


def decode_boxes_kernel(
    center_weight: float, size_weight: float, min_side: float | None, *, inclusive: bool
) -> Kernel:
    """Return the kernel of `maskrcnn::decode_boxes`.

    Args:
        center_weight: factor by which dx and dy were multiplied in encoding.
        size_weight: factor by which dw and dh were multiplied in encoding.
        min_side: minimum width and height, in pixels, of boxes that the output `large` marks. None:
            the kernel does not have this output.
        inclusive: whether boxes include the pixels at their right and bottom edges.
    """
    constants = (
        *_weights(center_weight, size_weight),
        ("MAX_LOG_SCALE", MAX_LOG_SCALE),
        ("MIN_SIDE", float(min_side or 0)),
        ("LARGE", int(min_side is not None)),
        ("INCLUSIVE", int(inclusive)),
    )
    return Kernel("box_deltas/decode_boxes.cu", "decode_boxes", constants)


def decode_boxes_launch(
    batch: int, references: int, classes: int, chosen: int, *, shared: bool
) -> Launch:
    """Return the grid, block and scalar arguments of `decode_boxes_kernel`.

    The kernel's inputs are, in this order:

    - deltas [batch, references, classes, 4] float32;
    - references [batch, references, 4] float32, or [1, references, 4] if `shared`;
    - indices [batch, chosen] int64 of the deltas to decode, among the references * classes deltas
      of an image;
    - image sizes (height, width), [batch, 2] int64.

    Outputs are boxes [batch, chosen, 4] float32 and, if the kernel has a `min_side`, `large`
    [batch, chosen] uint8: 1 for non-empty boxes whose sides are at least `min_side`, else 0.
    """
    # Do not round up by `-(-chosen // _THREADS)`: TensorRT's symbolic sizes have no negation.
    grid = ((chosen + _THREADS - 1) // _THREADS, batch, 1)
    scalars = (references, 0 if shared else references, classes, chosen)
    return Launch(grid, (_THREADS, 1, 1), scalars)


def _weights(center_weight: float, size_weight: float) -> tuple[tuple[str, int | float], ...]:
    return (
        ("CENTER_WEIGHT", float(center_weight)),
        ("SIZE_WEIGHT", float(size_weight)),
        ("THREADS", _THREADS),
    )


PREBUILT_KERNELS = (
    encode_boxes_kernel(1.0, 1.0),
    encode_boxes_kernel(10.0, 5.0),
    decode_boxes_kernel(1.0, 1.0, 1e-3, inclusive=False),
    decode_boxes_kernel(10.0, 5.0, 1e-2, inclusive=False),
    decode_boxes_kernel(10.0, 5.0, 0.0, inclusive=True),
)
