"""Training runs of a few seconds: their configuration, and functions that start them."""

import os
import sys
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import torch
from torch import Tensor

from maskrcnn_trt.model.checkpoint import Checkpoint, load_checkpoint
from maskrcnn_trt.training.config import TrainConfig, load_config
from maskrcnn_trt.training.distributed import worker
from maskrcnn_trt.training.evaluation.config import load_evaluation_config
from maskrcnn_trt.training.run import evaluate_checkpoint, run_training

CLASSES = ("circle", "ring", "star")

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
  backbone: {{name: resnet18, norm: gn, frozen_stages: 0, fpn_channels: 32, fpn_norm: gn}}
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
    loaded = load_checkpoint(checkpoint)
    overrides = (f"output_dir={output_dir}", *overrides)
    config = load_evaluation_config(str(tiny_config), overrides, loaded)
    with worker(config.device) as rank:
        return evaluate_checkpoint(loaded, config, rank)


def start(*args: str, processes: int) -> "Popen[bytes]":
    """Start `maskrcnn` in several processes under `torchrun`."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    # The number of threads determines the order of sums, and thus the last bits.
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-m", *launcher, "maskrcnn_trt", *args]
    return Popen(command, env=env, stdout=PIPE, stderr=PIPE)


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Return the largest absolute difference of any weight."""
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def assert_equal(first: Any, second: Any) -> None:
    """Compare nested values. Tensors must be equal bit by bit."""
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
