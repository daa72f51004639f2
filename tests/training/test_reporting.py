import json
import logging
import re
from pathlib import Path

import pytest
import torch
from rich.progress import Progress
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_run import LoadTiny

from maskrcnn_trt.model.losses import LOSS_NAMES
from maskrcnn_trt.training.distributed import Worker
from maskrcnn_trt.training.reporting import LOG_FILE, METRICS_FILE, DivergenceError, TrainingReport
from maskrcnn_trt.training.run import run_training

ALONE, OTHER = Worker(0, 1, torch.device("cpu")), Worker(1, 2, torch.device("cpu"))
NAMES = ("loss", *LOSS_NAMES)


def _losses(iteration: int) -> torch.Tensor:
    """Return losses with different medians and means."""
    return torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) * float(iteration**2)


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_losses_are_reported_once_a_period(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "maskrcnn_trt"),
        TrainingReport(tmp_path, 3, range(7), ALONE, Progress()) as report,
    ):
        for iteration in range(7):
            with report.waiting_for_data():
                pass
            report.record(iteration, _losses(iteration), rate=0.01 * (iteration + 1))
        report.record_metrics(7, {"segm/AP": 0.5})
    *lines, metrics = (
        json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()
    )
    assert metrics == {"iteration": 7, "segm/AP": 0.5}
    assert [line["iteration"] for line in lines] == [3, 6, 7]
    assert [line["lr"] for line in lines] == pytest.approx([0.03, 0.06, 0.07])
    means, medians = (5 / 3, 50 / 3, 36), (1, 16, 36)
    for line, mean, median in zip(lines, means, medians, strict=True):
        for name, factor in zip(NAMES, (15, 1, 2, 3, 4, 5), strict=True):
            assert line[name] == pytest.approx(mean * factor)
            assert line[f"{name}/median"] == pytest.approx(median * factor)
        assert line["time"] >= line["data_time"] >= 0
    scalars = _scalars(tmp_path)
    assert scalars.pop("segm/AP") == [(7, 0.5)]
    assert scalars == {
        name: [(line["iteration"], pytest.approx(line[name])) for line in lines]
        for name in lines[0]
        if name != "iteration"
    }
    assert len(caplog.messages) == 3


def test_a_resumed_run_replaces_later_lines(tmp_path: Path) -> None:
    """A killed run has reported iterations after its last checkpoint."""
    with TrainingReport(tmp_path, 1, range(4), ALONE, Progress()) as report:
        for iteration in range(4):
            report.record(iteration, torch.ones(5), rate=0.1)
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"iteration": 4, "lo')
    with TrainingReport(tmp_path, 1, range(2, 4), ALONE, Progress()) as report:
        for iteration in range(2, 4):
            report.record(iteration, torch.full((5,), 2.0), rate=0.1)
    lines = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert [(line["iteration"], line["loss"]) for line in lines] == [
        (1, 5), (2, 5), (3, 10), (4, 10),
    ]  # fmt: skip
    assert _scalars(tmp_path)["loss"] == [(1, 5), (2, 5), (3, 10), (4, 10)]


NUMBER = r"\d+\.\d+"
LOG_LINE = re.compile(
    r"eta: \d+:\d\d:\d\d  iter: (\d+)  "
    + "  ".join(rf"{name}: {NUMBER} \({NUMBER}\)" for name in NAMES)
    + rf"  time: {NUMBER}  data: {NUMBER}  lr: ({NUMBER})  max mem: \d+ MiB$"
)


def test_log_lines_have_losses_and_learning_rate(tiny: LoadTiny, tmp_path: Path) -> None:
    run_training(tiny("solver.max_iterations=3", "log_period=2"))
    lines = [line for line in (tmp_path / LOG_FILE).read_text().splitlines() if "eta" in line]
    matches = [LOG_LINE.search(line) for line in lines]
    assert [match and match[1] for match in matches] == ["2", "3"]
    assert [match and match[2] for match in matches] == ["0.006667", "0.010000"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, value: float) -> None:
    with TrainingReport(tmp_path, 2, range(4), ALONE, Progress()) as report:
        report.record(0, torch.tensor([1, 1, value, 1, 1.0]), rate=0.1)
        with pytest.raises(DivergenceError, match=r"solver\.base_lr.*solver\.clip_gradient_norm"):
            report.record(1, torch.ones(5), rate=0.1)


def test_a_run_that_diverges_leaves_no_checkpoint(tiny: LoadTiny, tmp_path: Path) -> None:
    config = tiny(
        "solver.base_lr=1e20", "solver.warmup_iterations=0", "solver.max_iterations=3",
        "log_period=3", "checkpoint_period=2",
    )  # fmt: skip
    with pytest.raises(DivergenceError, match=r"weight .*iteration 2"):
        run_training(config)
    assert not list(tmp_path.glob("*.pth"))


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with TrainingReport(tmp_path, 1, range(1), OTHER, Progress()) as report:
        report.record(0, torch.ones(5), rate=0.1)
        report.record_metrics(1, {"segm/AP": 0.5})
    assert not list(tmp_path.iterdir())
