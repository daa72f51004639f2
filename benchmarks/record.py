"""What the records of all benchmarks share: names of files, and parts of a page."""

import json
import re
import subprocess
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .report import Report


def begin_record(subject: str, report: Report, folder: Path) -> Path:
    """Write all numbers to `<subject>-<gpu>-<yyyymm>.json` in a folder, made if need be.

    Returns:
        The path of the page that belongs beside it, which ends in `.md`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    year, month, _ = report.measured_at.split("-", 2)
    page = folder / f"{subject}-{_short_name(report.machine.gpus)}-{year}{month}.md"
    page.with_suffix(".json").write_text(json.dumps(asdict(report)) + "\n")
    return page


def record_page(
    title: str,
    report: Report,
    *,
    on_gpu: bool,
    body: Sequence[str],
    counted: Sequence[str],
    goals: Sequence[str] = (),
) -> str:
    """The page of a record, in Markdown.

    Args:
        title: Its heading.
        report: What was measured.
        on_gpu: Whether a GPU did that.
        body: What was found, part after part, as they stand below each other.
        counted: Paragraphs that say what the numbers mean.
        goals: Sentences that say what was reached.
    """
    parts = [
        f"# {title}",
        f"\n```sh\n{report.command}\n```\n",
        _machine_table(report, on_gpu=on_gpu),
        *(["\n## Goals\n", *(f"- {goal}" for goal in goals)] if goals else []),
        *body,
        "\n## What is counted\n",
        paragraphs(*counted),
    ]
    return "\n".join(parts) + "\n"


def paragraphs(*texts: str) -> str:
    """Text in lines of a hundred columns."""
    return "\n\n".join(textwrap.fill(text, 100, break_on_hyphens=False) for text in texts)


def _machine_table(report: Report, *, on_gpu: bool) -> str:
    """Hardware, versions, commit and date, in Markdown."""
    machine = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    rows = [
        ("GPU" if on_gpu else "device", "; ".join(machine.gpus) if on_gpu else "none, the CPU"),
        ("CPU", f"{machine.cpu}, {machine.cores} cores"),
        ("versions", f"Python {machine.python}, {versions}"),
        ("commit", _commit()),
        ("measured", report.measured_at),
    ]
    return markdown_table(("machine", ""), rows)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; cells stand as they are given."""
    lines = (columns, ["---"] * len(columns), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _commit() -> str:
    """Commit of the code that was measured, if git knows."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        answer = subprocess.run(command, capture_output=True, check=True, text=True, timeout=30)
    except (FileNotFoundError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.strip()


def _short_name(gpus: Sequence[str]) -> str:
    """What a file name says of the machine, such as `h200` for `NVIDIA H200 (driver 580.1)`."""
    if not gpus:
        return "cpu"
    model = re.search(r"(?:RTX |GTX )?[A-Z]*\d+", gpus[0])
    return model[0].replace(" ", "").lower() if model else "gpu"
