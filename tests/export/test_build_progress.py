import io

from rich.console import Console
from rich.progress import Progress

from maskrcnn_trt.export.build_progress import BuildProgress


def test_phases_are_bars_within_bars() -> None:
    bars = Progress(console=Console(file=io.StringIO()), auto_refresh=False)
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


def test_phases_may_come_again_and_unannounced() -> None:
    bars = Progress(console=Console(file=io.StringIO()), auto_refresh=False)
    progress = BuildProgress(bars)
    for _ in range(2):
        progress.start("Timing tactics", "a parent that nobody announced", 3)
        progress.finish("Timing tactics")
    assert progress.advance("a phase that nobody announced", 0)
    progress.finish("a phase that nobody announced")
    assert bars.tasks == []


def test_a_cancelled_build_is_told_to_stop() -> None:
    progress = BuildProgress(Progress(console=Console(file=io.StringIO()), auto_refresh=False))
    progress.start("Building engine", None, 4)
    progress.cancel()
    assert not progress.advance("Building engine", 0)
