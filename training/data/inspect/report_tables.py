"""Format a data set report as tables for the terminal."""

from collections.abc import Iterable, Iterator
from dataclasses import astuple, fields

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .report import ClassCount, DatasetReport, Quantiles, SplitReport

# Classes with fewer objects than this are highlighted: they are hard to learn, and their AP is
# noisy.
_FEW = 50
# Maximum number of examples per reason.
_SUBJECTS_SHOWN = 3


def tables_from(report: DatasetReport) -> Iterator[RenderableType]:
    """Yield a report's tables: contents, distributions, classes, invalid or suspicious entries."""
    yield _overview(report)
    yield _distributions(report)
    yield _classes(report)
    findings = _findings(report)
    yield findings if findings.row_count else Text("no invalid or suspicious entries found")


def _overview(report: DatasetReport) -> Table:
    splits = report.splits.values()
    table = Table("", *report.splits, title="contents", title_justify="left")
    columns = (dict(_overview_rows(split)) for split in splits)
    for row in zip(*(column.items() for column in columns), strict=True):
        names, values = zip(*row, strict=True)
        table.add_row(names[0], *values)
    return table


def _overview_rows(split: SplitReport) -> Iterator[tuple[str, str]]:
    yield "images", str(split.images)
    yield "  without objects", _share(split.images_without_objects, split.images)
    for name, count in split.orientations.items():
        yield f"  {name}", _share(count, split.images)
    for name, count in split.resizing.items():
        yield f"  {name} by resizing", _share(count, split.images)
    yield "objects", str(split.objects)
    for name, count in split.object_sizes.items():
        yield f"  {name}", _share(count, split.objects)
    yield "crowds", str(split.crowds)


def _distributions(report: DatasetReport) -> Table:
    table = Table("", "", title="distributions over the images", title_justify="left")
    for quantile in fields(Quantiles):
        table.add_column(quantile.name, justify="right")
    for measure in ("width", "height", "aspect", "objects"):
        for name, split in report.splits.items():
            values = astuple(split.distributions[measure])
            table.add_row(measure, name, *(f"{round(value, 2):g}" for value in values))
    return table


def _share(count: int, total: int) -> str:
    return f"{count} ({100 * count / total:.1f} %)" if total else str(count)


def _classes(report: DatasetReport) -> Table:
    table = Table("class", title="objects by class", title_justify="left")
    for name in report.splits:
        table.add_column(name, justify="right")
    table.add_column("")
    splits = [{c.name: c for c in split.classes} for split in report.splits.values()]
    for name in dict.fromkeys(name for split in splits for name in split):
        cells = [
            _share(split[name].objects, whole.objects) if name in split else "not listed"
            for split, whole in zip(splits, report.splits.values(), strict=True)
        ]
        counts = [split.get(name) for split in splits]
        table.add_row(name, *cells, _remark(zip(report.splits, counts, strict=True)))
    return table


def _remark(counts: Iterable[tuple[str, ClassCount | None]]) -> Text:
    numbers = [(split, count.objects if count else 0) for split, count in counts]
    remarks = [f"{'few' if n else 'none'} in {split}" for split, n in numbers if n < _FEW]
    return Text(", ".join(remarks), style="yellow" if all(n for _, n in numbers) else "red")


def _findings(report: DatasetReport) -> Table:
    table = Table("where", "finding", title="findings", title_justify="left")
    table.add_column("count", justify="right")
    table.add_column("such as", overflow="fold")
    for name, split in report.splits.items():
        for reason, subjects in split.faults.items():
            table.add_row(name, f"invalid {reason}", *_examples(subjects), style="red")
        for reason, subjects in (*split.repairs.items(), *split.suspicions.items()):
            table.add_row(name, reason, *_examples(subjects))
    for reason, subjects in report.files.items():
        table.add_row("files", reason, *_examples(subjects))
    return table


def _examples(subjects: tuple[str, ...]) -> tuple[str, str]:
    more = ", ..." if len(subjects) > _SUBJECTS_SHOWN else ""
    return str(len(subjects)), ", ".join(subjects[:_SUBJECTS_SHOWN]) + more
