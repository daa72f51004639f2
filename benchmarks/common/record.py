"""Benchmark records: tables on the terminal, and Markdown, PNG and JSON files."""

import json
import math
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ...model.config.option_types import JSON_FILE, OUTPUT_FOLDER
from ...model.download.urls import without_credentials
from ...plugins.runtime.console import table_console
from .machine import MachineInfo, describe_machine

if TYPE_CHECKING:
    from matplotlib.axes import Axes

json_option = click.option(
    "--json",
    "json_path",
    type=JSON_FILE,
    help="Also write results and package versions to this JSON file.",
)


def output_option(contents: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the option `--output` to a command.

    Args:
        contents: files that the command writes besides the JSON file, for the help text, such as
            "a page, plots".
    """
    return click.option(
        "--output",
        type=OUTPUT_FOLDER,
        help=f"Folder for a record of the results: {contents}, and a JSON file.",
    )


@dataclass(frozen=True, kw_only=True)
class ResultTable:
    """One table of a benchmark record.

    On the terminal, columns that are empty in every row are omitted.
    """

    heading: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    # List items below the table.
    remarks: Sequence[str] = ()
    # Name of a column that is not printed on the terminal if all its cells are equal.
    optional_column: str = ""
    # Whether the table is printed on the terminal. The Markdown page always contains it.
    on_terminal: bool = True


@dataclass(frozen=True, kw_only=True)
class PlotGrid:
    """Plots of a benchmark record, drawn as a grid into one PNG."""

    # Alternative text of the image.
    alt: str
    # One function per plot, which draws into the given matplotlib Axes.
    plots: Sequence[Callable[["Axes"], None]]
    columns: int = 1
    # Width and height of one plot in inches.
    size: tuple[float, float] = (8, 5)
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Record of one benchmark run: results, tables, plots, notes, command line and machine."""

    # First part of the file names, such as `infer`.
    subject: str
    title: str
    # Instances of dataclasses. Their fields become keys of the JSON file.
    results: Sequence[Any]
    tables: Sequence[ResultTable]
    plots: PlotGrid
    # Paragraphs on the method of measurement. A mapping is a table of column names and meanings.
    notes: Sequence[str | Mapping[str, str]]
    # Sentences that compare results with goals.
    goals: Sequence[str] = ()
    # Whether a GPU was measured.
    on_gpu: bool
    # Further keys of the JSON file and their values.
    details: Mapping[str, Any] = field(default_factory=dict)
    command: str = field(
        default_factory=lambda: shlex.join(["maskrcnn", *map(without_credentials, sys.argv[1:])])
    )
    measured_at: str = field(
        default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds")
    )
    machine: MachineInfo = field(default_factory=describe_machine)


def publish(record: Record, json_path: Path | None = None, folder: Path | None = None) -> None:
    """Print the tables of a record, and write its files.

    If this function is called while an exception is handled, as in a `finally` block, the benchmark
    has ended early. The title of the record then states this, and its files are named
    `<subject>-partial-...`, so that they do not replace a complete record.

    Args:
        record: the record.
        json_path: path of a JSON file to write. None: do not write this file.
        folder: folder for a Markdown page, a PNG, and a JSON file. The JSON file has the same
            content as `json_path`. None: write none of these three files.
    """
    if sys.exception() is not None:
        title, subject = f"{record.title} (ended early)", f"{record.subject}-partial"
        record = replace(record, title=title, subject=subject)
    console = table_console()
    console.print(Text(record.title, style="bold"))
    for table in record.tables:
        if table.on_terminal:
            _print_table(console, table)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(_json_from(record, indent=2))
    if folder is not None:
        click.echo(f"record written to {write_record(record, folder)}")


def write_record(record: Record, folder: Path) -> Path:
    """Write a benchmark record as a Markdown page, a PNG of its plots, and a JSON file.

    The files are `<subject>-<gpu>-<yyyymm>` with the suffixes `.md`, `.png` and `.json`. Create the
    folder if necessary, and return the path of the Markdown page.
    """
    folder.mkdir(parents=True, exist_ok=True)
    year, month, _ = record.measured_at.split("-", 2)
    page = folder / f"{record.subject}-{_short_name(record.machine.gpus)}-{year}{month}.md"
    page.with_suffix(".json").write_text(_json_from(record))
    _draw_plots(record.plots, page.with_suffix(".png"))
    page.write_text(_page_from(record, page.with_suffix(".png").name))
    return page


def format_significant(value: float) -> str:
    """Format a positive number with three significant digits and without an exponent."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def format_verdict(met: bool) -> str:
    """Return `met` if a goal is met, else `missed`."""
    return "met" if met else "missed"


def _print_table(console: Console, table: ResultTable) -> None:
    parts: list[RenderableType] = []
    if table.rows:
        columns = list(zip(*table.rows, strict=True))
        rendered = Table(
            title=table.heading, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
        )
        kept = [
            i
            for i, cells in enumerate(columns)
            if any(cells) and (table.columns[i] != table.optional_column or len(set(cells)) > 1)
        ]
        for i in kept:
            numeric = i > 0 and any(cell[:1].isdigit() for cell in columns[i])
            rendered.add_column(
                table.columns[i], justify="right" if numeric else "left", no_wrap=i == 0
            )
        for row in table.rows:
            rendered.add_row(*(row[i] for i in kept))
        parts.append(rendered)
    for part in (*parts, *map(Text, table.remarks)):
        console.print(part)


def _json_from(record: Record, indent: int | None = None) -> str:
    content = {
        "results": record.results,
        "command": record.command,
        "measured_at": record.measured_at,
        "machine": record.machine,
        **record.details,
    }
    return json.dumps(content, indent=indent, default=asdict) + "\n"


def plot_stacked_bars(
    axes: "Axes", bars: Mapping[str, Mapping[str, float]], colours: Mapping[str, str]
) -> None:
    """Plot a stacked bar per item of `bars`.

    Args:
        axes: Axes to draw into.
        bars: Mapping from the label of each bar to its parts. The parts are a mapping from name to
            height, from bottom to top. All bars have parts of the same names.
        colours: Colours of parts, by name. Other parts get default colours.
    """
    bottoms = [0.0] * len(bars)
    for part in next(iter(bars.values())):
        heights = [bar[part] for bar in bars.values()]
        axes.bar(list(bars), heights, bottom=bottoms, label=part, color=colours.get(part))
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]


def _draw_plots(grid: PlotGrid, path: Path) -> None:
    from matplotlib.figure import Figure

    rows, (width, height) = math.ceil(len(grid.plots) / grid.columns), grid.size
    figure = Figure((width * grid.columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, grid.columns, squeeze=False)
    for draw, cell in zip(grid.plots, axes.flat, strict=False):
        draw(cell)
    for cell in axes.flat[len(grid.plots) :]:
        cell.remove()
    if grid.title:
        figure.suptitle(grid.title)
    figure.savefig(path, dpi=120)


def _page_from(record: Record, image: str) -> str:
    """Return the record as a Markdown page. `image` is the name of a PNG in the page's folder."""
    parts = [
        f"# {record.title}",
        f"```sh\n{record.command}\n```",
        _machine_table(record),
        *(["## Goals"] if record.goals else []),
        *_bullets(record.goals),
        *(part for table in record.tables for part in _table_parts(table)),
        f"![{record.plots.alt}]({image})",
        "## Method",
        *map(_format_note, record.notes),
    ]
    return "\n\n".join(parts) + "\n"


def _format_note(note: str | Mapping[str, str]) -> str:
    if isinstance(note, str):
        return textwrap.fill(note, 100, break_on_hyphens=False)
    return _markdown_table(("column", "meaning"), list(note.items()))


def _table_parts(table: ResultTable) -> list[str]:
    grid = [_markdown_table(table.columns, table.rows)] if table.rows else []
    return [f"## {table.heading}", *grid, *_bullets(table.remarks)]


def _bullets(items: Sequence[str]) -> list[str]:
    return ["\n".join(f"- {item}" for item in items)] if items else []


def _machine_table(record: Record) -> str:
    machine = record.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    rows = [
        ("GPU", "; ".join(machine.gpus)) if record.on_gpu else ("device", "none, the CPU"),
        ("CPU", f"{machine.cpu}, {machine.cores} cores"),
        ("versions", f"Python {machine.python}, {versions}"),
        ("commit", _commit()),
        ("measured", record.measured_at),
    ]
    return _markdown_table(("machine", ""), rows)


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (columns, ["---"] * len(columns), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _commit() -> str:
    """Return the Git commit of this package's source, or `unknown` outside of a Git checkout."""
    source = Path(__file__)
    commands = (
        # Fails if Git does not track this file. If the package is installed inside the Git checkout
        # of another project, `describe` alone would return the commit of that project.
        ("ls-files", "--error-unmatch", source.name),
        ("describe", "--always", "--dirty"),
    )
    try:
        for command in commands:
            answer = subprocess.run(
                ["git", "-C", source.parent, *command],
                capture_output=True, check=True, text=True, timeout=30,
            )  # fmt: skip
    except (FileNotFoundError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.strip()


def _short_name(gpus: Sequence[str]) -> str:
    """Return a short name of the first GPU for file names, or `cpu` if there is no GPU.

    For example, return `h200` for `NVIDIA H200 (driver 580.1)`.
    """
    if not gpus:
        return "cpu"
    model = re.search(r"(?:RTX |GTX )?[A-Z]*\d+", gpus[0])
    return model[0].replace(" ", "").lower() if model else "gpu"
