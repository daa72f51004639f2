"""Runs that end early: by a signal, a failing evaluation or a full disk."""

import errno
import itertools
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import LoadTiny, assert_equal, load_tiny, train

from maskrcnn_trt.model.checkpoint import CheckpointError, load_checkpoint
from maskrcnn_trt.training.curves import draw_curves
from maskrcnn_trt.training.distributed import Worker
from maskrcnn_trt.training.evaluation.validation import Validation
from maskrcnn_trt.training.interruption import Interruption, TrainingInterrupted
from maskrcnn_trt.training.reporting import LOG_FILE, METRICS_FILE
from maskrcnn_trt.training.run import run_training
from maskrcnn_trt.training.terminal import terminal_progress


def _start_training(tiny_config: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """Start `maskrcnn train` under `nohup`, in a process group of its own."""
    command = ("nohup", sys.executable, "-m", "maskrcnn_trt", "train", str(tiny_config))
    return subprocess.Popen([*command, *overrides], stderr=subprocess.PIPE, start_new_session=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "processes", "to_group"),
    # A terminal sends SIGINT to the group, and `timeout`, systemd and Slurm send SIGTERM to it. The
    # training processes also end after a checkpoint if the process that started them is killed.
    [(signal.SIGINT, 1, True), (signal.SIGTERM, 1, True), (signal.SIGKILL, 2, False)],
)
def test_signals_end_a_run_after_a_checkpoint(
    tiny_config: Path, tmp_path: Path, *, number: signal.Signals, processes: int, to_group: bool
) -> None:
    settings = ("log_period=1", "data.workers=1", "solver.max_iterations=100000", "solver.steps=[]")
    log = tmp_path / "run" / "log.txt"
    metrics = tmp_path / "run" / "metrics.jsonl"
    settings += (f"processes={processes}", f"output_dir={log.parent}")
    process = _start_training(tiny_config, *settings)
    while not (metrics.exists() and metrics.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGHUP)  # ignored under `nohup`
    if to_group:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == (-number if number == signal.SIGKILL else 130)
    assert b"--resume" in errors
    assert b"Traceback" not in errors
    last = load_checkpoint(log.parent / (log.parent / "last_checkpoint").read_text().strip())
    reported = [json.loads(line)["iteration"] for line in metrics.read_text().splitlines()]
    assert last.iteration == reported[-1]


@pytest.mark.slow
def test_a_signal_ends_an_evaluation_in_two_processes(tiny_config: Path, tmp_path: Path) -> None:
    """Rank 0 waits until a pipe is read, and rank 1 waits for the metrics of rank 0."""
    folder = tmp_path / "inference"
    folder.mkdir()
    os.mkfifo(folder / "bbox.json")
    earlier = folder / "coco_results.pth"
    earlier.touch()
    settings = ("solver.max_iterations=1", "solver.steps=[]", "evaluation={}", "processes=2")
    process = _start_training(tiny_config, f"output_dir={tmp_path}", *settings)
    while earlier.exists():  # removed before rank 0 writes to the pipe
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)
    process.terminate()
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"interrupted after iteration 1 of 1" in errors
    assert f"maskrcnn train {tmp_path / 'config.yaml'} --resume".encode() in errors
    assert b"Error" not in errors
    assert load_checkpoint(tmp_path / "model_final.pth").iteration == 1


def test_a_signal_just_before_an_evaluation_interrupts_it() -> None:
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(TrainingInterrupted), interruption.immediate():
            pass


def test_failing_evaluations_lose_nothing(
    tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resumed run goes on with the evaluation."""
    whole = train(load_tiny(tiny_config, tmp_path / "whole", "evaluation={}"))
    config = load_tiny(tiny_config, tmp_path / "cut", "evaluation={}")
    with monkeypatch.context() as patch:
        patch.setattr(Validation, "measure", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run_training(config)
    resumed = load_checkpoint(run_training(config, resume=True))
    assert_equal(resumed.weights, whole.weights)
    assert resumed.metrics == whole.metrics
    assert resumed.metrics


def test_full_disks_are_reported(tiny: LoadTiny, tmp_path: Path) -> None:
    config = tiny()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"model_final\.pth.*space on the disk"):
            run_training(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.glob(".*.partial"))


def test_a_log_that_cannot_be_written_does_not_end_the_run(
    tiny: LoadTiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Writing to /dev/full fails as on a full disk."""
    config = tiny("log_period=1")
    for name in (LOG_FILE, METRICS_FILE):
        (tmp_path / name).symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING):
        checkpoint = load_checkpoint(run_training(config))
    assert checkpoint.iteration == config.solver.max_iterations
    for name in (LOG_FILE, METRICS_FILE):
        assert caplog.text.count(f"{name}: No space left on device") == 1


@pytest.mark.parametrize("file", ["full disk", "closed pipe"])
def test_a_standard_error_that_cannot_be_written_does_not_end_the_run(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full" if file == "full disk" else writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with terminal_progress(Worker(0, 1, torch.device("cpu")), tmp_path / LOG_FILE):
            logging.getLogger("maskrcnn_trt").info("one line")
    log = (tmp_path / LOG_FILE).read_text()
    assert log.count("one line") == log.count("cannot write standard error: ") == 1


@pytest.mark.parametrize("successes", [1, 66], ids=["early", "at the end"])
def test_a_failing_tensorboard_does_not_end_the_run(
    successes: int,
    tiny: LoadTiny,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    # Here, because every worker process imports this file, and tensorboard imports boto3.
    from tensorboard.summary.writer.record_writer import RecordWriter

    write, writes = RecordWriter.write, itertools.count()

    def fail_after_first(writer: Any, data: bytes) -> None:
        if next(writes) >= successes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(writer, data)

    monkeypatch.setattr(RecordWriter, "write", fail_after_first)
    before = threading.excepthook
    config = tiny("log_period=1", "trackers=[tensorboard]")
    checkpoint = load_checkpoint(run_training(config))
    assert checkpoint.iteration == config.solver.max_iterations
    assert caplog.text.count("No space left on device") == 1
    assert "Traceback" not in capfd.readouterr().err
    assert threading.excepthook is before


def test_curves_leave_out_damaged_and_missing_metrics(tiny: LoadTiny, tmp_path: Path) -> None:
    run_training(tiny("log_period=1"))
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"iteration": 3, "lo')
    assert draw_curves(tmp_path).is_file()
    (tmp_path / METRICS_FILE).unlink()
    assert draw_curves(tmp_path).is_file()
