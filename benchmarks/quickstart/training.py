"""Training of the quickstart's model, on a CPU in several processes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from ...training.config import TrainConfig

# Processes of a training on a CPU. Two processes of one thread take two thirds of the time of one
# process with two threads, because most maps are too small to be divided among threads.
_CPU_RANKS: Final = 2


def train_model(config: "TrainConfig") -> Path:
    """Train a model, and return the path of the final checkpoint.

    Raises:
        click.exceptions.Exit: The training failed. Its error message is on standard error.
    """
    import torch

    from ...training.config import yaml_from_config
    from ...training.run import run_training
    from ...training.run_folder import FINAL_CHECKPOINT

    cores = len(os.sched_getaffinity(0))
    if torch.cuda.is_available() or cores < _CPU_RANKS:
        return run_training(config)
    settings = config.output_dir.with_suffix(".yaml")
    settings.write_text(yaml_from_config(config))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = ["--nproc-per-node", str(_CPU_RANKS), "-m", "maskrcnn_trt", "train", str(settings)]
    environment = os.environ | {"OMP_NUM_THREADS": str(cores // _CPU_RANKS)}
    code = subprocess.run([*launcher, *command], env=environment, check=False).returncode
    if code:
        raise click.exceptions.Exit(code if code > 0 else 128 - code)
    return config.output_dir / FINAL_CHECKPOINT
