import json
import logging
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.progress import Progress
from tiny_run import LoadTiny
from torch.amp.grad_scaler import GradScaler

from maskrcnn_trt.model.losses import LOSS_NAMES
from maskrcnn_trt.training.config import ConfigError, DataConfig, DatasetConfig, TrainConfig
from maskrcnn_trt.training.distributed import Worker
from maskrcnn_trt.training.reporting import LOG_FILE, METRICS_FILE, DivergenceError, TrainingReport
from maskrcnn_trt.training.run import run_training
from maskrcnn_trt.training.terminal import terminal_progress
from maskrcnn_trt.training.tracking import open_trackers

ALONE, OTHER = Worker(0, 1, torch.device("cpu")), Worker(1, 2, torch.device("cpu"))
DISABLED = GradScaler("cpu", enabled=False)
NAMES = ("loss", *LOSS_NAMES)


def _config(folder: Path, *trackers: str) -> TrainConfig:
    data = DatasetConfig(images=folder, annotations=folder)
    values = {"output_dir": folder, "data": DataConfig(train=data), "trackers": trackers}
    return TrainConfig.model_validate(values)


def _report(
    folder: Path,
    period: int,
    iterations: range,
    *trackers: str,
    scaler: GradScaler = DISABLED,
) -> TrainingReport:
    opened = open_trackers(_config(folder, *trackers), iterations.start)
    return TrainingReport(folder, period, iterations, ALONE, Progress(), scaler, opened)


def _losses(iteration: int) -> torch.Tensor:
    """Return losses with different medians and means."""
    return torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) * float(iteration**2)


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    # Here, because every worker process imports this file, and tensorboard imports boto3.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def _drawing(folder: Path) -> Path:
    path = folder / "validation_images" / "0000001.png"
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", (30, 20), (255, 0, 0)).save(path)
    return path


def test_tensorboard_shows_drawings(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with _report(tmp_path, 1, range(1), "tensorboard") as report:
        report.record_drawing(1, _drawing(tmp_path))
        report.record_drawing(1, tmp_path / "none.png")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (shown,) = events.Images("validation_images")
    assert (shown.step, shown.width, shown.height) == (1, 30, 20)


def test_losses_are_reported_once_a_period(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "maskrcnn_trt"),
        _report(tmp_path, 3, range(7), "tensorboard") as report,
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
    """A killed run has reported iterations after its last checkpoint. Damaged lines are dropped."""
    with _report(tmp_path, 1, range(4), "tensorboard") as report:
        for iteration in range(4):
            report.record(iteration, torch.ones(5), rate=0.1)
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"iter\n\x00\n[]\n{"iteration": 4, "lo')
    # TensorBoard reads files in the order of their names, which contain the second of creation.
    (events,) = (tmp_path / "tensorboard").iterdir()
    events.rename(events.with_name("events.out.tfevents.1000000000"))
    with _report(tmp_path, 1, range(2, 4), "tensorboard") as report:
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


def test_names_that_are_not_utf_8_are_logged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("maskrcnn_trt")
    # pytest-xdist cannot send captured logs with such names.
    monkeypatch.setattr(logger, "propagate", False)
    with terminal_progress(ALONE, tmp_path / LOG_FILE):
        logger.warning("skipped photo\udce9.jpg")
    assert (tmp_path / LOG_FILE).read_text().endswith("skipped photo\\udce9.jpg\n")
    assert "Traceback" not in capfd.readouterr().err


def test_logging_of_the_program_is_respected(capsys: pytest.CaptureFixture[str]) -> None:
    logger, own = logging.getLogger("maskrcnn_trt"), logging.StreamHandler()
    logger.addHandler(own)
    try:
        for level, own_level, lines in (
            (logging.NOTSET, logging.NOTSET, 1),
            (logging.NOTSET, logging.ERROR, 1),
            (logging.WARNING, logging.NOTSET, 0),
        ):
            logger.setLevel(level)
            own.setLevel(own_level)
            with terminal_progress(ALONE):
                logger.info("a line")
            assert logger.level == level
            assert capsys.readouterr().err.count("a line") == lines
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(own)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, value: float) -> None:
    with _report(tmp_path, 2, range(4)) as report:
        report.record(0, torch.tensor([1, 1, value, 1, 1.0]), rate=0.1)
        with pytest.raises(DivergenceError, match=r"solver\.base_lr.*solver\.clip_gradient_norm"):
            report.record(1, torch.ones(5), rate=0.1)


@pytest.mark.parametrize(("overflows", "scale"), [(2, 2.0**14), (32, 2.0**-16)])
def test_overflows_down_to_the_minimum_scale_do_not_end_a_run(
    tmp_path: Path, overflows: int, scale: float
) -> None:
    with _report(tmp_path, 1, range(1), scaler=_scaler_after(overflows)) as report:
        report.record(0, torch.ones(5), rate=0.1)
    (line,) = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert json.loads(line)["loss_scale"] == scale


def test_a_run_whose_gradients_always_overflow_ends(tmp_path: Path) -> None:
    """Its losses stay finite, because its weights never change."""
    with (
        _report(tmp_path, 1, range(40, 41), scaler=_scaler_after(33)) as report,
        pytest.raises(DivergenceError, match=r"iteration 41.*precision=bf16") as caught,
    ):
        report.record(40, torch.ones(5), rate=0.1)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def _scaler_after(overflows: int) -> GradScaler:
    """Return a loss scaler after a number of steps whose gradient was infinite."""
    weight, scaler = torch.zeros(1, requires_grad=True), GradScaler("cpu")
    optimizer = torch.optim.SGD([weight])
    for _ in range(overflows):
        scaler.scale(torch.inf * weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


def test_a_run_that_diverges_leaves_no_checkpoint(tiny: LoadTiny, tmp_path: Path) -> None:
    config = tiny(
        "solver.base_lr=1e20", "solver.warmup_iterations=0", "solver.max_iterations=3",
        "log_period=3", "checkpoint_period=2",
    )  # fmt: skip
    with pytest.raises(DivergenceError, match=r"weight .*iteration 2"):
        run_training(config)
    assert not list(tmp_path.glob("*.pth"))


def test_a_loss_scale_below_the_minimum_is_not_stored(
    tiny: LoadTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run would end at its first report."""
    scaler = _scaler_after(33)
    monkeypatch.setattr(torch.amp.grad_scaler, "GradScaler", lambda *_, **__: scaler)
    config = tiny("solver.max_iterations=3", "log_period=3", "checkpoint_period=2")
    with pytest.raises(DivergenceError, match=r"loss scale .*iteration 2"):
        run_training(config)
    assert not list(tmp_path.glob("*.pth"))


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with TrainingReport(tmp_path, 1, range(1), OTHER, Progress(), DISABLED) as report:
        report.record(0, torch.ones(5), rate=0.1)
        report.record_metrics(1, {"segm/AP": 0.5})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_missing_tracker_is_named_before_training(
    tiny: LoadTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        run_training(tiny(f"trackers=[{name}]"))
    assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.filterwarnings("ignore")
def test_mlflow_continues_the_run_of_a_resumed_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.chdir(tmp_path)
    with _report(tmp_path, 1, range(1), "mlflow") as report:
        report.record_metrics(1, {"segm/AP/<a:b>": 0.5})
        report.record_drawing(1, _drawing(tmp_path))
    with _report(tmp_path, 1, range(1, 2), "mlflow") as report:
        report.record_metrics(2, {"segm/AP/<a:b>": 0.75})
    (run,) = mlflow.search_runs(output_format="list")
    client = mlflow.MlflowClient()
    (key,) = run.data.metrics
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)] == [
        (1, 0.5), (2, 0.75),
    ]  # fmt: skip
    assert run.info.status == "FINISHED"
    (drawing,) = client.list_artifacts(run.info.run_id, "validation_images")
    assert drawing.path == "validation_images/0000001.png"
    # A failing server is logged once, and training continues.
    with _report(tmp_path, 1, range(1, 3), "mlflow") as report:
        client.delete_run(run.info.run_id)
        report.record_metrics(3, {"loss": 1.0})
        report.record_metrics(4, {"loss": 1.0})
    assert len([m for m in caplog.messages if "the tracker mlflow failed" in m]) == 1
    lines = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert json.loads(lines[-1]) == {"iteration": 4, "loss": 1.0}


@pytest.mark.filterwarnings("ignore")
def test_wandb_receives_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with _report(tmp_path, 1, range(1), "wandb") as report:
        report.record_metrics(1, {"loss": 2.5})
        assert wandb.run.summary["loss"] == 2.5
        report.record_drawing(1, _drawing(tmp_path))
        assert wandb.run.summary["validation_images"]["width"] == 30
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
