"""Compilation and launch of `match_boxes.cu` and `match_best.cu`."""

from ..compilation import Kernel, Launch

_THREADS = 256
_ITEMS = 4
_TILE = 128

MATCH_BEST = Kernel("match_best.cu", "match_best", (("THREADS", _THREADS),))


def match_boxes_kernel(
    foreground_iou: float, background_iou: float, *, low_quality: bool
) -> Kernel:
    """The kernel that matches by IoU, and for `MATCH_BEST` finds the highest of each truth."""
    constants = (
        ("FOREGROUND_IOU", float(foreground_iou)),
        ("BACKGROUND_IOU", float(background_iou)),
        ("LOW_QUALITY", int(low_quality)),
        ("ITEMS", _ITEMS),
        ("TILE", _TILE),
        ("THREADS", _THREADS),
    )
    return Kernel("match_boxes.cu", "match_boxes", constants)


def match_boxes_launch(batch: int, truths: int, candidates: int, *, shared: bool) -> Launch:
    """Launch of the first kernel.

    Truths [B, G, 4], labels [B, G] int64 and candidates [B, N, 4], or [1, N, 4] if shared ->
    target [B, N] int64, positive and negative [B, N] uint8; for low-quality matches also the
    highest IoU of each candidate [B, N] float32, and that of each truth [B, G] int32, a float's
    bits, zero before.
    """
    grid = (-(-candidates // (_THREADS * _ITEMS)), batch, 1)
    return Launch(grid, (_THREADS, 1, 1), _scalars(truths, candidates, shared))


def match_best_launch(batch: int, truths: int, candidates: int, *, shared: bool) -> Launch:
    """Launch of `MATCH_BEST`: truths, candidates and both highest IoUs -> positive, negative."""
    grid = (-(-candidates // _THREADS), batch, 1)
    return Launch(grid, (_THREADS, 1, 1), _scalars(truths, candidates, shared))


def _scalars(truths: int, candidates: int, shared: bool) -> tuple[int, int, int]:
    return truths, candidates, 0 if shared else candidates


VARIANTS = (
    match_boxes_kernel(0.7, 0.3, low_quality=True),
    match_boxes_kernel(0.5, 0.5, low_quality=False),
    MATCH_BEST,
)
