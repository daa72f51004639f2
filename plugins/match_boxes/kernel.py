"""Compilation and launch of `match_boxes.cu` and `match_best.cu`."""

from ..runtime.compilation import Kernel, Launch

# Threads per block.
_THREADS = 256
# Candidates per thread.
_ITEMS = 4
# Ground-truth boxes that a block loads at once.
_TILE = 128

# Kernel that marks the candidates of highest IoU with each ground-truth box as positive. With
# `low_quality`, it runs after `match_boxes_kernel`.
MATCH_BEST = Kernel("match_boxes/match_best.cu", "match_best", (("THREADS", _THREADS),))


def match_boxes_kernel(
    foreground_iou: float, background_iou: float, *, low_quality: bool
) -> Kernel:
    """Return the kernel that matches candidates (anchors or RoIs) to ground-truth boxes by IoU.

    Args:
        foreground_iou: smallest IoU of positive candidates.
        background_iou: candidates with a smaller IoU are negative.
        low_quality: whether the kernel has two more outputs, which the kernel `MATCH_BEST` reads:
            the highest IoU of each candidate and of each ground-truth box.
    """
    constants = (
        ("FOREGROUND_IOU", float(foreground_iou)),
        ("BACKGROUND_IOU", float(background_iou)),
        ("LOW_QUALITY", int(low_quality)),
        ("ITEMS", _ITEMS),
        ("TILE", _TILE),
        ("THREADS", _THREADS),
    )
    return Kernel("match_boxes/match_boxes.cu", "match_boxes", constants)


def match_boxes_launch(batch: int, truths: int, candidates: int, *, shared: bool) -> Launch:
    """Return the grid, block and scalar arguments of `match_boxes_kernel`.

    An image has G = `truths` ground-truth boxes and N = `candidates` candidates. If `shared`, all
    images have the same candidates.

    Inputs:
        - ground-truth boxes [batch, G, 4] float32
        - labels [batch, G] int64
        - candidates [batch, N, 4] or, if `shared`, [1, N, 4] float32

    Outputs:
        - index of each candidate's ground-truth box [batch, N] int64
        - whether a candidate is positive, and whether it is negative: [batch, N] uint8 each

    Two more outputs, if the kernel was made with `low_quality=True`:
        - highest IoU of each candidate [batch, N] float32
        - highest IoU of each ground-truth box [batch, G], whose float32 bits are stored as int32;
          must be zeroed before the launch
    """
    grid = (-(-candidates // (_THREADS * _ITEMS)), batch, 1)
    return Launch(grid, (_THREADS, 1, 1), (truths, candidates, 0 if shared else candidates))


def match_best_launch(batch: int, truths: int, candidates: int, *, shared: bool) -> Launch:
    """Return the grid, block and scalar arguments of the kernel `MATCH_BEST`.

    `MATCH_BEST` runs after `match_boxes_kernel`. It makes the candidates of highest IoU with each
    ground-truth box positive and not negative.

    An image has G = `truths` ground-truth boxes and N = `candidates` candidates. If `shared`, all
    images have the same candidates.

    Inputs:
        - ground-truth boxes [batch, G, 4] float32
        - candidates [batch, N, 4] or, if `shared`, [1, N, 4] float32
        - the last two outputs of `match_boxes_kernel`: highest IoU of each candidate and of each
          ground-truth box

    Outputs of `match_boxes_kernel` that this kernel updates:
        - whether a candidate is positive, and whether it is negative: [batch, N] uint8 each
    """
    grid = (-(-candidates // _THREADS), batch, 1)
    return Launch(grid, (_THREADS, 1, 1), (truths, candidates, 0 if shared else candidates))


PREBUILT_KERNELS = (
    match_boxes_kernel(0.7, 0.3, low_quality=True),
    match_boxes_kernel(0.5, 0.5, low_quality=False),
    MATCH_BEST,
)
