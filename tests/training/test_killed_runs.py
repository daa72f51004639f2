"""Runs that are killed at random moments and resumed."""

import random
import signal
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch
from tiny_run import assert_equal, fork_server, load_tiny, train

from maskrcnn_trt.model.checkpoint import load_checkpoint
from maskrcnn_trt.training.config import TrainConfig
from maskrcnn_trt.training.run import run_training

ITERATIONS = 10


def _train_in_process(config: TrainConfig, threads: int) -> None:
    # The number of threads determines the order of sums, and thus the last bits.
    torch.set_num_threads(threads)
    run_training(config, resume=True)


def _start(config: TrainConfig) -> ForkServerProcess:
    arguments = config, torch.get_num_threads()
    process = fork_server().Process(target=_train_in_process, args=arguments)
    process.start()
    return process


def _last_iteration(folder: Path) -> int:
    pointer = folder / "last_checkpoint"
    if not pointer.exists():
        return 0
    return load_checkpoint(folder / pointer.read_text().strip()).iteration


def _wait(process: ForkServerProcess, moment: Callable[[], bool]) -> None:
    while process.is_alive() and not moment():
        time.sleep(0.001)


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed_equals_uninterrupted(
    tiny_config: Path, tmp_path: Path
) -> None:
    """Compare weights, optimizer and random states bit by bit. Incomplete files are ignored."""
    settings = (
        "checkpoint_period=1", f"solver.max_iterations={ITERATIONS}", "solver.ema_decay=0.9",
        "solver.schedule=cosine",
    )  # fmt: skip
    config = load_tiny(tiny_config, tmp_path / "killed", *settings)
    folder, moments = config.output_dir, random.Random(4)
    whole = train(load_tiny(tiny_config, tmp_path / "whole", *settings))
    kills = 0
    for attempt in range(4):
        before = _last_iteration(folder)
        process = _start(config)
        if attempt % 2:
            # While a checkpoint is being written.
            _wait(process, lambda: any(folder.glob(".model_*.partial")))
        else:
            _wait(process, (folder / "log.txt").exists)
            deadline = time.monotonic() + moments.uniform(0, 0.8)
            _wait(process, lambda end=deadline: time.monotonic() > end)
        process.kill()
        process.join()
        kills += process.exitcode == -signal.SIGKILL
        assert _last_iteration(folder) >= before
    assert kills >= 2
    (folder / ".model_0000099.pth.partial").write_bytes(b"half a checkpoi")
    resumed = train(config, resume=True)
    assert not list(folder.glob(".*.partial"))
    assert resumed.iteration == ITERATIONS
    assert_equal(resumed.weights, whole.weights)
    assert_equal(resumed.training_state, whole.training_state)
