"""Compilation and launch of `paste_rle.cu`."""

from ..runtime.compilation import Kernel, Launch

# Threads per block.
_THREADS = 256


def paste_rle_kernel(probability: str, side: int, threshold: float, *, exact: bool) -> Kernel:
    """Return the kernel that pastes masks into images and outputs run lengths.

    Args:
        probability: type of the masks, `float` or `float16`.
        side: height and width of a mask.
        threshold: pixels above this probability belong to a mask.
        exact: True: use detectron2's rule, which does not round boxes. False: use torchvision's
            rule, which truncates boxes to whole pixels.
    """
    constants = (
        ("EXACT", int(exact)),
        ("PROBABILITY", probability),
        ("SIDE", side),
        ("THREADS", _THREADS),
        ("THRESHOLD", float(threshold)),
    )
    return Kernel("paste_rle/paste_rle.cu", "paste_rle", constants)


def paste_rle_launch(instances: int, capacity: int) -> Launch:
    """Return the grid, block and scalar arguments of `paste_rle_kernel`.

    Inputs:
        - masks [instances, side, side] of the type `probability` of `paste_rle_kernel`
        - boxes [instances, 4] float32
        - image sizes (height, width) [instances, 2] int64

    Outputs:
        - run lengths [instances, capacity] int32
        - number of runs of each mask [instances] int32, including runs beyond the capacity
    """
    return Launch((instances, 1, 1), (_THREADS, 1, 1), (capacity,))


PREBUILT_KERNELS = (
    paste_rle_kernel("float", 28, 0.5, exact=False),
    paste_rle_kernel("float16", 28, 0.5, exact=True),
    paste_rle_kernel("float", 14, 0.5, exact=True),
)
