import io
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from maskrcnn_trt.export.engines.build_log import BuildLog, BuildProgress, progress_monitor


def test_sections_share_a_file_but_not_their_errors(tmp_path: Path) -> None:
    log = BuildLog(tmp_path / "build.log")
    log.path.write_text("older export")
    with log.section("first.plan"):
        log.write("INFO", "begins")
        log.write("ERROR", "this\nfailed")
        log.write("INTERNAL_ERROR", "and that")
        log.write("VERBOSE", "Layers:\nName: a")
    assert log.errors == ["this failed", "and that"]
    assert log.listing == "Layers:\nName: a"
    log.write("WARNING", "after the end")
    with log.section("second.plan"):
        log.write("INFO", "begins again")
    assert (log.errors, log.listing) == ([], "")
    assert log.path.read_text() == (
        "=== first.plan\nINFO begins\nERROR this\nfailed\nINTERNAL_ERROR and that\n"
        "VERBOSE Layers:\nName: a\n=== second.plan\nINFO begins again\n"
    )


def test_full_disk_ends_the_log_but_not_the_build() -> None:
    log = BuildLog(Path("/dev/full"))
    with log.section("first.plan"):
        for number in range(10_000):
            log.write("ERROR", f"failed for the {number}th time")
    assert len(log.errors) == 10_000


def test_log_without_sections_creates_no_file(tmp_path: Path) -> None:
    BuildLog(tmp_path / "build.log").write("ERROR", "early")
    assert not (tmp_path / "build.log").exists()


def hidden_bars() -> Progress:
    return Progress(console=Console(file=io.StringIO()), auto_refresh=False)


def test_nested_phases_are_indented_bars() -> None:
    bars = hidden_bars()
    progress = BuildProgress(bars)
    progress.start("Building engine", None, 4)
    progress.start("Timing tactics", "Building engine", 3)
    assert progress.advance("Timing tactics", 0)
    assert [(task.description, task.completed, task.total) for task in bars.tasks] == [
        ("Building engine", 0, 4),
        ("  Timing tactics", 1, 3),
    ]
    progress.finish("Timing tactics")
    assert progress.advance("Building engine", 3)
    assert [(task.description, task.completed) for task in bars.tasks] == [("Building engine", 4)]


def test_phases_can_repeat_and_be_unknown() -> None:
    bars = hidden_bars()
    progress = BuildProgress(bars)
    for _ in range(2):
        progress.start("Timing tactics", "unknown parent", 3)
        progress.finish("Timing tactics")
    assert progress.advance("unknown phase", 0)
    progress.finish("unknown phase")
    assert bars.tasks == []


def test_cancelled_build_stops() -> None:
    progress = BuildProgress(hidden_bars())
    progress.start("Building engine", None, 4)
    progress.cancel()
    assert not progress.advance("Building engine", 0)


def test_error_in_a_callback_stops_the_build() -> None:
    """TensorRT itself would only print the error."""
    progress = BuildProgress(hidden_bars())
    monitor = progress_monitor(pytest.importorskip("tensorrt_rtx"), progress)
    monitor.phase_start(["no text"], None, 4)
    assert isinstance(progress.error, TypeError)
    assert not monitor.step_complete("Building engine", 0)
