"""Results in bulk as tables."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .bulk import BulkResult

SPEED_COLUMNS = ("batch", "images/s", "engine", "share", "found")


def speed_rows(results: Sequence[BulkResult]) -> list[tuple[str, ...]]:
    """Cells of the columns `SPEED_COLUMNS`, a row a batch size."""
    return [
        (
            str(r.batch),
            f"{r.images_per_second:.1f}",
            f"{r.engine_images_per_second:.1f}",
            f"{r.share:.1%}",
            f"{r.detections_per_image:.1f}",
        )
        for r in results
    ]


def step_rows(results: Sequence[BulkResult]) -> list[tuple[str, ...]]:
    """Milliseconds of a batch by step, a row a batch size."""
    return [tuple(f"{ms:.2f}" for ms in r.step_milliseconds.values()) for r in results]


def bulk_table(results: Sequence[BulkResult]) -> Table:
    """Speed and steps, a row a batch size; all of one backend in one precision."""
    first = results[0]
    title = f"From files to masks, {first.engine} in {first.precision}; steps of a batch in ms"
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in (*SPEED_COLUMNS, *first.step_milliseconds):
        table.add_column(name, justify="right")
    for speed, steps in zip(speed_rows(results), step_rows(results), strict=True):
        table.add_row(*speed, *steps)
    return table
