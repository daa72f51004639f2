import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_run
import torch
from tiny_run import LoadTiny, assert_equal, largest_difference, load_tiny, measure, train

from maskrcnn_trt.model.checkpoint import load_checkpoint
from maskrcnn_trt.training.config import ConfigError, load_config
from maskrcnn_trt.training.reporting import METRICS_FILE
from maskrcnn_trt.training.run import evaluate_checkpoint, run_training


@pytest.mark.slow
@pytest.mark.parametrize("change", ["solver.accumulate=2", "compile=true"])
def test_two_processes_equal_one(
    change: str, tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare weights and losses with float tolerance. The backbone is frozen after one epoch."""
    # Compilation itself takes minutes on a CPU.
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    settings = (
        change, "solver.freeze_backbone_after_epoch=1", "solver.max_iterations=6",
        "solver.base_lr=0.001", "log_period=1",
    )  # fmt: skip
    args = ("train", str(tiny_config), f"output_dir={tmp_path / 'together'}", *settings)
    if change == "compile=true":
        # The number of threads determines the order of sums, and thus the last bits.
        monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
        command = [sys.executable, "-m", "maskrcnn_trt", *args, "processes=2"]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    else:  # forked, which is faster
        codes, printed, _ = tiny_run.run_in_two_processes(tmp_path, *args)
        assert codes == [0, 0]
    alone = train(load_tiny(tiny_config, tmp_path / "alone", *settings, "compile=false"))
    path = tmp_path / "together" / "model_final.pth"
    assert printed.splitlines()[0] == f"the final checkpoint is {path}"
    both = load_checkpoint(path)
    assert len(both.training_state["generators"]) == 2
    assert largest_difference(both.weights, alone.weights) < 1e-5
    ours, theirs = (_losses(tmp_path / name) for name in ("together", "alone"))
    assert len(ours) == alone.iteration
    for first, second in zip(ours, theirs, strict=True):
        assert first == pytest.approx(second, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_two_processes_evaluate_the_model_that_they_save(tiny_config: Path, tmp_path: Path) -> None:
    """With batch norm, each process has the statistics of its own images after a step."""
    settings = (
        "model.backbone.norm=bn", "solver.ema_decay=0.9", "solver.max_iterations=2",
        "evaluation={skip_test: false, losses: true, images_per_batch: 1}",
    )  # fmt: skip
    args = ("train", str(tiny_config), f"output_dir={tmp_path / 'run'}", *settings)
    codes, _, errors = tiny_run.run_in_two_processes(tmp_path, *args)
    assert codes == [0, 0], errors
    path = tmp_path / "run" / "model_final.pth"
    expected = measure(path, tiny_config, tmp_path / "evaluated", *settings)
    assert load_checkpoint(path).metrics == pytest.approx(expected, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_equal_one(tiny_config: Path, tmp_path: Path) -> None:
    """Compiled steps; those of one GPU are replayed as CUDA graphs."""
    # One bucket, because the compilation for each of them takes a minute.
    settings = (
        "compile=true", "channels_last=true", "data.buckets=[[96,96]]", "solver.max_iterations=10",
        "solver.base_lr=0.001", "log_period=1",
    )  # fmt: skip
    for device in ("0", "0,1"):
        output = f"output_dir={tmp_path / device}"
        command = [sys.executable, "-m", "maskrcnn_trt", "train", str(tiny_config), output]
        subprocess.run([*command, f"device={device}", *settings], check=True, timeout=300)
    alone, both = (load_checkpoint(tmp_path / name / "model_final.pth") for name in ("0", "0,1"))
    assert len(both.training_state["generators"]) == 2
    assert largest_difference(both.weights, alone.weights) < 1e-3
    for first, second in zip(_losses(tmp_path / "0,1"), _losses(tmp_path / "0"), strict=True):
        assert first == pytest.approx(second, rel=1e-2, abs=1e-3)


def _losses(folder: Path) -> list[dict[str, float]]:
    lines = (folder / METRICS_FILE).read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name.startswith("loss")}
        for line in lines
    ]


def test_a_run_is_evaluated_and_described(
    tiny: LoadTiny, tiny_config: Path, tmp_path: Path
) -> None:
    config = tiny("solver.max_iterations=2",
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
    assert "box AP and AR" in (tmp_path / "log.txt").read_text()
    measured = measure(tmp_path / "model_final.pth", tiny_config, tmp_path)
    assert measured == checkpoint.metrics
    assert json.loads((tmp_path / "inference" / "bbox.json").read_text())


def test_classes_come_from_the_data(tiny: LoadTiny) -> None:
    with pytest.raises(ConfigError, match=r"num_classes is 80.* 3 .*set model\.num_classes=3"):
        run_training(tiny("model.num_classes=80"))


def test_a_run_is_not_started_twice(
    tiny: LoadTiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The terminal shows the log: long lines are not wrapped, and brackets stay."""
    config = tiny("solver.max_iterations=1", "evaluation={}")
    first = train(config)
    lines = capsys.readouterr().err.splitlines()
    assert lines == (tmp_path / "log.txt").read_text().splitlines()
    assert sum("maxDets=100" in line for line in lines) == 20
    assert max(map(len, lines)) > 200
    with pytest.raises(ConfigError, match=r"model_final\.pth.*--resume"):
        run_training(config)
    saved = (tmp_path / "config.yaml").read_text()
    changed = tiny("solver.max_iterations=1", "evaluation={}", "solver.base_lr=0.5")
    again = train(changed, resume=True)
    assert_equal(again.weights, first.weights)
    assert "already ended at iteration 1; to train longer" in capsys.readouterr().err
    assert (tmp_path / "config.yaml").read_text() == saved


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_are_shown_on_a_terminal(tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := _Terminal())
    monkeypatch.setenv("TERM", "xterm")
    train(tiny("solver.max_iterations=1", "evaluation={}"))
    assert "training" in terminal.getvalue()
    assert "evaluating" in terminal.getvalue()


def test_the_effective_configuration_is_saved(tiny: LoadTiny, tmp_path: Path) -> None:
    """Also when a resumed run changes it."""
    overrides = ("solver={images_per_batch: 4, scale_from_batch: 2, max_iterations: 4, steps: []}",)
    for more in ((), ("solver.clip_gradient_norm=1", "solver.max_iterations=6")):
        config = tiny(*overrides, *more)
        train(config, resume=True)
        kept = load_config(str(tmp_path / "config.yaml"))
        assert kept.model.num_classes == 3
        assert kept.model_copy(update={"model": config.model}) == config
    log = (tmp_path / "log.txt").read_text()
    assert log.count("solver: optimizer=sgd images_per_batch=4 ") == 2
    assert " base_lr=0.04 " in log
    assert " max_iterations=2 " in log


def test_a_configuration_of_the_user_is_kept(tiny: LoadTiny, tmp_path: Path) -> None:
    file, kept = tmp_path / "config.yaml", tmp_path / "config-original-1.yaml"
    file.write_text("# mine\nbase: quick\n")
    config = tiny("solver.max_iterations=1", "evaluation.skip_test=true")
    run_training(config)
    assert kept.read_text() == "# mine\nbase: quick\n"
    assert load_config(file).solver.max_iterations == 1
    run_training(tiny("solver.max_iterations=2", "evaluation.skip_test=true"), resume=True)
    assert not list(tmp_path.glob("config-original-2*"))
    assert load_config(file).solver.max_iterations == 2


def test_wrong_arguments_raise_before_the_work(tiny_config: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TrainConfig"):
        run_training("quick")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no file name"):
        train(load_config(str(tiny_config), ['output_dir="a\\0b"']))
    checkpoint = tmp_path / "model.pth"
    train(load_tiny(tiny_config, tmp_path / "run", "solver.max_iterations=1"))
    checkpoint.write_bytes((tmp_path / "run" / "model_final.pth").read_bytes())
    for report in (checkpoint, tmp_path, "/proc/report.html", "a\0.html"):
        with pytest.raises(ConfigError, match=r"the report .*; choose another path"):
            evaluate_checkpoint(checkpoint, tiny_config, (), report)
    load_checkpoint(checkpoint)
