import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import largest_difference, load_tiny, start_training, train

from maskrcnn_trt.model.checkpoint import load_checkpoint
from maskrcnn_trt.training.config import ConfigError
from maskrcnn_trt.training.reporting import METRICS_FILE
from maskrcnn_trt.training.run import run_evaluation, run_training


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_processes_equal_one(tiny_config: Path, tmp_path: Path, accumulate: int) -> None:
    """To float tolerance, weights and reported losses."""
    settings = ["solver.max_iterations=2", "log_period=1"]
    together = start_training(
        str(tiny_config),
        f"output_dir={tmp_path / 'together'}",
        f"solver.accumulate={accumulate}",
        *settings,
        processes=2,
    )
    alone = train(load_tiny(tiny_config, tmp_path / "alone", *settings))
    assert together.wait() == 0
    both = load_checkpoint(tmp_path / "together" / "model_final.pth")
    assert largest_difference(both.weights, alone.weights) < 1e-5
    ours, theirs = (_losses(tmp_path / name) for name in ("together", "alone"))
    assert len(ours) == 2
    for first, second in zip(ours, theirs, strict=True):
        assert first == pytest.approx(second, rel=1e-4, abs=1e-5)


def _losses(folder: Path) -> list[dict[str, float]]:
    lines = (folder / METRICS_FILE).read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name.startswith("loss")}
        for line in lines
    ]


def test_killed_and_resumed_equals_uninterrupted(tiny_config: Path, tmp_path: Path) -> None:
    """Bit for bit, weights and state of the optimiser."""
    folder = tmp_path / "killed"
    endless = start_training(
        str(tiny_config), f"output_dir={folder}", "checkpoint_period=1", "solver.max_iterations=999"
    )
    while not (folder / "last_checkpoint").exists():
        assert endless.poll() is None, "training ended without a checkpoint"
        time.sleep(0.01)
    endless.kill()
    assert endless.wait() == -signal.SIGKILL
    name = (folder / "last_checkpoint").read_text().strip()
    end = f"solver.max_iterations={load_checkpoint(folder / name).iteration + 2}"
    resumed = train(load_tiny(tiny_config, folder, end), resume=True)
    whole = train(load_tiny(tiny_config, tmp_path / "whole", end))
    assert resumed.iteration == whole.iteration
    _assert_equal(resumed.weights, whole.weights)
    _assert_equal(resumed.training_state, whole.training_state)


def _assert_equal(first: Any, second: Any) -> None:
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            _assert_equal(first[key], second[key])
    elif isinstance(first, torch.Tensor):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    else:
        assert first == second


def test_a_run_is_evaluated_and_described(tiny_config: Path, tmp_path: Path) -> None:
    config = load_tiny(
        tiny_config, tmp_path, "solver.max_iterations=2",
        "evaluation={period: 1, skip_test: false}", "model.roi.score_threshold=0",
    )  # fmt: skip
    checkpoint = train(config)
    assert [category.name for category in checkpoint.categories] == ["circle", "ring", "star"]
    assert checkpoint.model_config.num_classes == 3
    assert checkpoint.buckets == config.data.buckets
    assert checkpoint.preprocessing.min_size == 64
    assert checkpoint.iteration == 2
    lines = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    evaluations = [line for line in lines if "segm/AP" in line]
    assert [line["iteration"] for line in evaluations] == [1, 2]
    assert evaluations[1] == {"iteration": 2, **checkpoint.metrics}
    assert run_evaluation(tmp_path / "model_final.pth", config) == checkpoint.metrics
    assert json.loads((tmp_path / "bbox.json").read_text())


def test_classes_come_from_the_data(tiny_config: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        run_training(load_tiny(tiny_config, tmp_path, "model.num_classes=80"))
    assert "model.num_classes is 80, but " in str(caught.value)
    assert str(caught.value).endswith("has 3 categories; set model.num_classes=3, or leave it out")


def test_a_run_is_not_started_twice(tiny_config: Path, tmp_path: Path) -> None:
    config = load_tiny(tiny_config, tmp_path, "solver.max_iterations=1")
    first = train(config)
    with pytest.raises(ConfigError, match="holds a run that got to model_final"):
        run_training(config)
    again = train(config, resume=True)
    _assert_equal(again.weights, first.weights)


def test_evaluation_needs_data_of_the_same_classes(
    tiny_config: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"no validation set; set data\.val\.images"):
        run_evaluation(tiny_checkpoint, load_tiny(tiny_config, tmp_path, "data.val=null"))
    content = json.loads((tiny_config.parent / "annotations" / "val.json").read_text())
    content["categories"].append({"id": 4, "name": "bar"})
    path = tmp_path / "four.json"
    path.write_text(json.dumps(content))
    config = load_tiny(tiny_config, tmp_path, f"data.val.annotations={path}")
    with pytest.raises(ConfigError, match="has 4 categories, but the model knows 3 classes"):
        run_evaluation(tiny_checkpoint, config)
