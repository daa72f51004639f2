import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tiny_run import (
    LoadTiny,
    assert_equal,
    largest_difference,
    load_tiny,
    run_in_two_processes,
    train,
)

from maskrcnn_trt.model.checkpoint import load_checkpoint
from maskrcnn_trt.training.commands import train as train_command
from maskrcnn_trt.training.config import ConfigError
from maskrcnn_trt.training.evaluation.validation import ExpectationError
from maskrcnn_trt.training.stability import Stability, train_seeds

SETTINGS = (
    "solver.max_iterations=2", "evaluation.skip_test=false", "model.roi.score_threshold=0.001",
    "model.roi.max_detections=40",
)  # fmt: skip


@pytest.mark.slow
def test_seeds_are_compared(tiny_config: Path, tmp_path: Path) -> None:
    """In one process and in two, each seed equals a single run. Finished runs are not repeated."""
    folder = tmp_path / "alone"
    stability = train_seeds(load_tiny(tiny_config, folder, "seed=3", *SETTINGS), 2)
    together = f"output_dir={tmp_path / 'together'}"
    codes, printed, _ = run_in_two_processes(
        tmp_path, "train", str(tiny_config), "--seeds=2", together, "seed=3", *SETTINGS
    )
    assert codes == [0, 0]
    single = train(load_tiny(tiny_config, tmp_path / "single", "seed=4", *SETTINGS))
    runs = [load_checkpoint(folder / f"seed-{seed}" / "model_final.pth") for seed in (3, 4)]
    assert_equal(runs[1].weights, single.weights)
    assert runs[1].metrics == single.metrics
    assert stability.metrics == {3: runs[0].metrics, 4: single.metrics}
    for seed, run in zip((3, 4), runs, strict=True):
        both = load_checkpoint(tmp_path / f"together/seed-{seed}/model_final.pth")
        assert largest_difference(both.weights, run.weights) < 1e-5
    content = json.loads((folder / "stability.json").read_text())
    assert content["seeds"] == {"3": runs[0].metrics, "4": runs[1].metrics}
    for name in ("bbox/AP", "segm/AR10"):
        values = [run.metrics[name] for run in runs]
        assert content["mean"][name] == pytest.approx(np.mean(values))
        assert content["deviation"][name] == pytest.approx(np.std(values, ddof=1))

    written = [path.stat().st_mtime_ns for path in folder.glob("seed-*/model_final.pth")]
    arguments = [str(tiny_config), f"output_dir={folder}", "seed=3", *SETTINGS, "--seeds=2"]
    result = CliRunner().invoke(train_command, [*arguments, "--resume"])
    assert result.exit_code == 0
    again = [path.stat().st_mtime_ns for path in folder.glob("seed-*/model_final.pth")]
    assert written == again
    for text in (result.stdout, printed):
        assert text.count("deviation") == 1
        assert text.count("stability.json") == 1


def test_finished_runs_without_metrics_are_evaluated(
    tiny: LoadTiny, tiny_config: Path, tmp_path: Path
) -> None:
    """The mean is compared with the expected metrics afterwards."""
    settings = ("solver.max_iterations=1", "evaluation={expected: {segm/AP: 0.9}}")
    for seed in (0, 1):
        folder = tmp_path / f"seed-{seed}"
        plain = (f"seed={seed}", "solver.max_iterations=1", "data.val=null")
        train(load_tiny(tiny_config, folder, *plain))
    with pytest.raises(ExpectationError, match=r"segm/AP is 0\.0"):
        train_seeds(tiny(*settings), 2, resume=True)
    stability = train_seeds(tiny(settings[0], "evaluation={}"), 2, resume=True)
    assert stability.table().row_count == 4
    content = json.loads((tmp_path / "stability.json").read_text())
    for seed in (0, 1):
        last = load_checkpoint(tmp_path / f"seed-{seed}" / "model_final.pth")
        assert last.metrics == stability.metrics[seed] == content["seeds"][str(seed)]


def test_all_folders_are_checked_before_the_first_run(tiny: LoadTiny, tmp_path: Path) -> None:
    (tmp_path / "seed-1").mkdir()
    (tmp_path / "seed-1" / "model_final.pth").touch()
    with pytest.raises(ConfigError, match=r"seed-1 contains a run"):
        train_seeds(tiny(*SETTINGS), 2)
    assert not (tmp_path / "seed-0" / "model_final.pth").exists()


def test_metrics_that_a_run_lacks_have_no_mean() -> None:
    stability = Stability({0: {"val/loss": 1, "bbox/AP": 0.25}, 1: {"bbox/AP": 0.75}})
    assert stability.mean == {"bbox/AP": 0.5}
    assert stability.deviation.keys() == {"bbox/AP"}


@pytest.mark.parametrize(
    "override", ["data.val=null", "evaluation.skip_test=true", "evaluation.skip_eval=true"]
)
def test_seeds_need_an_evaluation(tiny: LoadTiny, override: str) -> None:
    with pytest.raises(ConfigError, match=r"set data\.val"):
        train_seeds(tiny(*SETTINGS, override), 2)
