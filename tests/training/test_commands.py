"""Mistyped arguments of `maskrcnn train`."""

import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from maskrcnn_trt.training.commands import train
from maskrcnn_trt.training.config import ConfigError
from maskrcnn_trt.training.data.coco.dataset import DataError


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["quick", "--epochs", "10"], "solver.epochs="),
        (["quick", "--iterations", "10"], "solver.max_iterations="),
        (["quick", "--lr=0.1"], "solver.base_lr="),
        (["quick", "--base-lr", "0.1"], "solver.base_lr="),
        (["quick", "--device", "cpu"], "device="),
        (["quick", "output_dir", "runs/x"], "output_dir=runs/x"),
        (["quick", "seed=3", "solver.base_lr"], "solver.base_lr=VALUE"),
        (["finetune", "data", "--batch-size", "3"], "solver.images_per_batch="),
    ],
)
def test_keys_written_as_options_are_answered_with_the_key(
    arguments: list[str], remedy: str
) -> None:
    result = CliRunner().invoke(train, arguments)
    assert result.exit_code == 2
    assert remedy in result.output


def test_a_missing_file_is_not_taken_for_a_misspelling_of_finetune() -> None:
    with pytest.raises(ConfigError, match=r"'finetune\.yaml' is neither a file nor a preset"):
        train.main(["finetune.yaml"], standalone_mode=False)


@pytest.mark.parametrize("option", ["--resum", "--nothing-of-that-kind"])
def test_other_unknown_options_are_as_in_all_commands(option: str) -> None:
    with pytest.raises(click.NoSuchOption):
        train.main(["quick", option], standalone_mode=False)


def test_a_schedule_that_ends_before_its_first_step_is_a_warning(tmp_path: Path) -> None:
    # The run fails at once, because the data set does not exist.
    data = [f"data.train.{key}={tmp_path / key}" for key in ("images", "annotations")]
    common = ["quick", *data, f"output_dir={tmp_path / 'run'}"]
    output = CliRunner().invoke(train, [*common, "solver.max_iterations=200"]).output
    assert "solver.steps=[140,180]" in output
    assert "520" in output
    assert "steps" not in CliRunner().invoke(train, common).output
    scaled = [*common, "solver.epochs=2", "solver.steps=[8]"]
    assert "this run, which solver.epochs=2 sets" in CliRunner().invoke(train, scaled).output


def test_options_may_precede_finetune() -> None:
    with pytest.raises(click.NoSuchOption, match="--seeds"):
        train.main(["--seeds", "2", "finetune", "data"], standalone_mode=False)
    for options in ([], ["--resume"]):
        with pytest.raises(ConfigError, match="finetune"):
            train.main([*options, "quick", "finetune"], standalone_mode=False)


def test_no_key_is_needed(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    paths = "{images: nowhere, annotations: nowhere}"
    output = tmp_path / "run"
    config.write_text(f"{{base: quick, output_dir: {output}, data: {{train: {paths}}}}}")
    assert isinstance(CliRunner().invoke(train, [str(config)]).exception, DataError)
    for arguments in (["finetune", "nowhere"], ["--dry-run", "finetune", "nowhere"]):
        assert isinstance(CliRunner().invoke(train, arguments).exception, DataError)


def test_mistyped_keys_are_reported_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for arguments in (["quick", "solver.lr=1"], ["finetune", "data", "solver.lr=1"]):
        result = CliRunner().invoke(train, arguments)
        assert isinstance(result.exception, ConfigError)
        assert "solver.lr" in str(result.exception)
