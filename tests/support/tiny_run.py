"""Training runs of a few seconds: their configuration, and functions that start them."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore

from maskrcnn_trt.cli import main
from maskrcnn_trt.model.checkpoint import Checkpoint, load_checkpoint
from maskrcnn_trt.training.config import TrainConfig, load_config
from maskrcnn_trt.training.launcher import rank_environment
from maskrcnn_trt.training.run import evaluate_checkpoint, run_training

CLASSES = ("circle", "ring", "star")
# Function that loads the configuration of a tiny run. Its arguments are overrides.
LoadTiny = Callable[..., TrainConfig]

_CONFIG = """
device: cpu
precision: fp32
channels_last: false
log_period: 2
data:
  train: {{images: {folder}/train, annotations: {folder}/annotations/train.json}}
  val: {{images: {folder}/val, annotations: {folder}/annotations/val.json}}
  min_size: 64
  max_size: 96
  buckets: [[64, 96], [96, 64]]
  workers: 0
model:
  backbone: {{name: resnet10, norm: gn, frozen_stages: 0, fpn_channels: 32, fpn_norm: gn}}
  anchors: {{sizes: [8, 16, 32, 64, 128]}}
  rpn:
    pre_nms_top_n_train: 50
    pre_nms_top_n_test: 50
    post_nms_top_n_train: 20
    post_nms_top_n_test: 20
  roi: {{box_head_dim: 32, mask_head_dim: 16, mask_head_depth: 1, max_detections: 10}}
solver:
  images_per_batch: 4
  base_lr: 0.01
  max_iterations: 4
  steps: [3]
  warmup_iterations: 2
evaluation: {{skip_test: true}}
"""


def write_config(folder: Path) -> Path:
    """Write the configuration of a run on the data set in a folder."""
    path = folder / "tiny.yaml"
    path.write_text(_CONFIG.format(folder=folder))
    return path


def load_tiny(tiny_config: Path, output_dir: Path, *overrides: str) -> TrainConfig:
    return load_config(str(tiny_config), [f"output_dir={output_dir}", *overrides])


def train(config: TrainConfig, *, resume: bool = False) -> Checkpoint:
    """Train in this process. Return the final checkpoint."""
    return load_checkpoint(run_training(config, resume=resume))


def measure(
    checkpoint: Path, tiny_config: Path, output_dir: Path, *overrides: str
) -> dict[str, float]:
    """Evaluate in this process. Return the metrics."""
    overrides = (f"output_dir={output_dir}", *overrides)
    return evaluate_checkpoint(str(checkpoint), tiny_config, overrides)


def fork_server() -> ForkServerContext:
    """Return a context whose processes are forked from a server that has imported torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["maskrcnn_trt.benchmarks.accuracy", "maskrcnn_trt.training.run"]
    )
    return context


@contextmanager
def two_processes(folder: Path, *args: str) -> Iterator[list[ForkServerProcess]]:
    """Start the processes of `run_in_two_processes`, and yield them. Wait for both at the end."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = (store.port, args, torch.get_num_threads(), folder)
    ranks = [fork_server().Process(target=_run_rank, args=(rank, *common)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    yield ranks
    for rank in ranks:
        rank.join()


def run_in_two_processes(folder: Path, *args: str) -> tuple[list[int | None], str, str]:
    """Run `maskrcnn` in two processes of one process group, as `torchrun` does.

    Args:
        folder: an existing folder for the output of the processes.
        *args: command line.

    Returns:
        The exit codes, the standard output of both processes, and their standard error.
    """
    with two_processes(folder, *args) as ranks:
        pass
    printed, errors = (
        "".join((folder / f"{rank}.{stream}").read_text() for rank in range(2))
        for stream in ("stdout", "stderr")
    )
    return [rank.exitcode for rank in ranks], printed, errors


def _run_rank(rank: int, port: int, args: tuple[str, ...], threads: int, folder: Path) -> None:
    os.environ.update(rank_environment(rank, 2, port))
    # The number of threads determines the order of sums, and thus the last bits of results.
    torch.set_num_threads(threads)
    for stream in (sys.stdout, sys.stderr):
        file = os.open(folder / f"{rank}.{stream.name.strip('<>')}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, stream.fileno())
    sys.argv = ["maskrcnn", *args]
    main()


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Return the largest absolute difference between the weights of two state dicts."""
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def assert_equal(first: Any, second: Any) -> None:
    """Check that nested values are equal. Tensors must be equal without tolerance."""
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_equal(first[key], second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_equal(one, other)
    elif isinstance(first, torch.Tensor):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    else:
        assert first == second
