import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tiny_run import assert_equal, largest_difference, load_tiny, start, train

from maskrcnn_trt.model.checkpoint import load_checkpoint
from maskrcnn_trt.training.commands import train as train_command
from maskrcnn_trt.training.config import ConfigError
from maskrcnn_trt.training.evaluation.validation import ExpectationError
from maskrcnn_trt.training.stability import train_seeds

SETTINGS = (
    "solver.max_iterations=2", "evaluation.skip_test=false", "model.roi.score_threshold=0.001",
    "model.roi.max_detections=40",
)  # fmt: skip


@pytest.mark.slow
def test_seeds_are_compared(tiny_config: Path, tmp_path: Path) -> None:
    """In one process and in two, each seed equals a single run. Finished runs are not repeated."""
    folder = tmp_path / "alone"
    together = start(
        "train", str(tiny_config), "--seeds=2", f"output_dir={tmp_path / 'together'}", "seed=3",
        *SETTINGS, processes=2,
    )  # fmt: skip
    stability = train_seeds(load_tiny(tiny_config, folder, "seed=3", *SETTINGS), 2)
    printed, _ = together.communicate()
    assert together.returncode == 0
    runs = [
        train(load_tiny(tiny_config, tmp_path / str(seed), f"seed={seed}", *SETTINGS))
        for seed in (3, 4)
    ]
    for seed, run in zip((3, 4), runs, strict=True):
        assert_equal(load_checkpoint(folder / f"seed-{seed}/model_final.pth").weights, run.weights)
        both = load_checkpoint(tmp_path / f"together/seed-{seed}/model_final.pth")
        assert largest_difference(both.weights, run.weights) < 1e-5
        assert stability.metrics[seed] == run.metrics
    content = json.loads((folder / "stability.json").read_text())
    assert content["seeds"] == {"3": runs[0].metrics, "4": runs[1].metrics}
    for name in ("bbox/AP", "segm/AR10"):
        values = [run.metrics[name] for run in runs]
        assert content["mean"][name] == pytest.approx(np.mean(values))
        assert content["deviation"][name] == pytest.approx(np.std(values, ddof=1))
    _check_resumed(tiny_config, folder, printed.decode())


def _check_resumed(tiny_config: Path, folder: Path, printed: str) -> None:
    written = [path.stat().st_mtime_ns for path in folder.glob("seed-*/model_final.pth")]
    result = CliRunner().invoke(
        train_command,
        [str(tiny_config), f"output_dir={folder}", "seed=3", *SETTINGS, "--seeds=2", "--resume"],
    )
    assert result.exit_code == 0
    again = [path.stat().st_mtime_ns for path in folder.glob("seed-*/model_final.pth")]
    assert written == again
    for text in (result.stdout, printed):
        assert text.count("deviation") == 1
        assert text.count("stability.json") == 1


def test_the_mean_is_compared_with_the_expected_metrics(tiny_config: Path, tmp_path: Path) -> None:
    config = load_tiny(tiny_config, tmp_path, *SETTINGS, "evaluation.expected={segm/AP: 0.9}")
    with pytest.raises(ExpectationError, match=r"segm/AP is 0\.0"):
        train_seeds(config, 2)
    content = json.loads((tmp_path / "stability.json").read_text())
    assert set(content["seeds"]) == {"0", "1"}


def test_finished_runs_without_metrics_are_evaluated(tiny_config: Path, tmp_path: Path) -> None:
    settings = ("solver.max_iterations=1", "evaluation={}")
    for seed in (0, 1):
        folder = tmp_path / f"seed-{seed}"
        train(load_tiny(tiny_config, folder, f"seed={seed}", *settings, "data.val=null"))
    stability = train_seeds(load_tiny(tiny_config, tmp_path, *settings), 2, resume=True)
    assert stability.table().row_count == 4
    for seed in (0, 1):
        last = load_checkpoint(tmp_path / f"seed-{seed}" / "model_final.pth")
        assert last.metrics == stability.metrics[seed]


@pytest.mark.parametrize(
    "override", ["data.val=null", "evaluation.skip_test=true", "evaluation.skip_eval=true"]
)
def test_seeds_need_an_evaluation(tiny_config: Path, tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"set data\.val"):
        train_seeds(load_tiny(tiny_config, tmp_path, *SETTINGS, override), 2)
