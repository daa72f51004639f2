"""Compilation and launch of `paste_rle.cu`."""

from ..compilation import Kernel, Launch

_THREADS = 256


def paste_rle_kernel(probability: str, side: int, threshold: float, *, exact: bool) -> Kernel:
    """The kernel that pastes masks of a type and side.

    Args:
        probability: type of the masks, `float` or `float16`.
        side: M.
        threshold: pixels above this probability belong to a mask.
        exact: boxes are taken as they are, as detectron2 does, and not as whole pixels.
    """
    constants = (
        ("EXACT", int(exact)),
        ("PROBABILITY", probability),
        ("SIDE", side),
        ("THREADS", _THREADS),
        ("THRESHOLD", float(threshold)),
    )
    return Kernel("paste_rle.cu", "paste_rle", constants)


def paste_rle_launch(instances: int, capacity: int) -> Launch:
    """Launch for masks [N, M, M], boxes [N, 4] float32 and sizes [N, 2] int64.

    Its outputs are counts [N, capacity] and num_runs [N], both int32.
    """
    return Launch((instances, 1, 1), (_THREADS, 1, 1), (capacity,))


VARIANTS = (
    paste_rle_kernel("float", 28, 0.5, exact=False),
    paste_rle_kernel("float16", 28, 0.5, exact=True),
    paste_rle_kernel("float", 14, 0.5, exact=True),
)
