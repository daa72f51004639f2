import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tiny_run import LoadTiny, assert_equal, largest_difference, load_tiny, train

from maskrcnn_trt.model.checkpoint import Checkpoint, load_checkpoint
from maskrcnn_trt.training.config import ConfigError
from maskrcnn_trt.training.data.coco.dataset import CocoDataset, DataError
from maskrcnn_trt.training.data.loading.batch_reader import BatchReader
from maskrcnn_trt.training.data.loading.loader import train_loader
from maskrcnn_trt.training.evaluation.validation import ExpectationError, Validation
from maskrcnn_trt.training.reporting import METRICS_FILE
from maskrcnn_trt.training.run import run_training
from maskrcnn_trt.training.run_length import with_run_length


def _evaluations(folder: Path) -> dict[int, dict[str, float]]:
    """Metrics by iteration."""
    lines = [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]
    return {line["iteration"]: line for line in lines if "segm/AP" in line}


@pytest.mark.parametrize(
    ("last", "settings", "iterations"),
    [(2, "{}", [2]), (6, "{period: 3, per_epoch: true}", [3, 4, 6]),
     (4, "{per_epoch: true, skip_test: true}", []), (4, "{per_epoch: true, skip_eval: true}", [])],
)  # fmt: skip
def test_evaluations_fall_due(
    tiny: LoadTiny, tmp_path: Path, last: int, settings: str, iterations: list[int]
) -> None:
    train(tiny(f"solver.max_iterations={last}", "solver.steps=[]", f"evaluation={settings}"))
    assert list(_evaluations(tmp_path)) == iterations
    assert (tmp_path / "inference" / "bbox.json").exists() == ("skip_test" not in settings)


def test_an_epoch_shows_every_image_once(tiny: LoadTiny) -> None:
    """In batches of one shape bucket, of which the last is filled up."""
    config = tiny()
    dataset = CocoDataset(config.data.train)
    wide = sum(record.width > record.height for record in dataset.records)
    batches = math.ceil(wide / 4) + math.ceil((len(dataset) - wide) / 4)
    # The tests of evaluations and of freezing assume this length.
    assert train_loader(dataset, config).iterations_per_epoch == batches == 4


def test_a_run_ends_with_the_number_of_unreadable_images(
    tiny: LoadTiny, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny("solver.max_iterations=4", "evaluation.skip_test=true")
    # A copy, because other tests read the same files.
    images = shutil.copytree(config.data.train.images, config.output_dir / "images")
    first, *others = sorted(images.iterdir())
    first.write_bytes(b"no image")
    train(
        tiny("solver.max_iterations=4", "evaluation.skip_test=true", f"data.train.images={images}")
    )
    assert f"1 of {len(others) + 1} images" in caplog.text


def test_losses_are_reported_before_an_evaluation(tiny: LoadTiny, tmp_path: Path) -> None:
    """Which may end the run."""
    settings = "evaluation={period: 3, min_bbox_ap: 0}"
    train(tiny("solver.max_iterations=5", "log_period=2", settings))
    lines = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert [line["iteration"] for line in lines if "loss" in line] == [2, 3]


def test_a_finished_run_is_evaluated_once(tiny: LoadTiny, tmp_path: Path) -> None:
    """A run that ended without an evaluation is evaluated when it is resumed at its end."""
    train(tiny("solver.max_iterations=3", "checkpoint_period=2"))
    (tmp_path / "last_checkpoint").write_text("model_0000002.pth")
    config = tiny("solver.max_iterations=1", "evaluation={}")
    checkpoint = train(config, resume=True)
    assert list(_evaluations(tmp_path)) == [checkpoint.iteration] == [2]
    assert "segm/AP" in checkpoint.metrics
    path = tmp_path / "model_final.pth"
    written = path.stat().st_mtime_ns
    assert run_training(config, resume=True) == path
    assert path.stat().st_mtime_ns == written


def test_a_killed_evaluation_without_metrics_is_repeated(
    tiny: LoadTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("solver.max_iterations=1", "evaluation={skip_eval: true}")
    with monkeypatch.context() as patch:
        patch.setattr(Validation, "measure", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_training(config)
    run_training(config, resume=True)
    assert (tmp_path / "inference" / "bbox.json").exists()


def test_images_that_vanish_leave_a_checkpoint(
    tiny: LoadTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("solver.max_iterations=4", "checkpoint_period=100", "data.workers=0")
    read, calls = BatchReader.__getitem__, itertools.count()

    def vanish(self: BatchReader, plan: Any) -> Any:
        if next(calls) == 2:
            return DataError("000001.jpg: No such file or directory")
        return read(self, plan)

    monkeypatch.setattr(BatchReader, "__getitem__", vanish)
    with pytest.raises(DataError, match=r"000001\.jpg.*iteration 2.*--resume"):
        run_training(config)
    assert load_checkpoint(tmp_path / "model_0000002.pth").iteration == 2
    assert train(config, resume=True).iteration == 4


def test_reached_targets_end_the_run(tiny: LoadTiny, tmp_path: Path) -> None:
    """A run that has reached its targets stays ended when resumed, unless they are raised."""
    settings = ("solver.max_iterations=5", "evaluation={period: 2, min_bbox_ap: 0, min_mask_ap: 0}")
    checkpoint = train(tiny(*settings))
    assert checkpoint.iteration == 2
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth\n"
    assert "iteration 2 of 5: bbox/AP 0.0" in (tmp_path / "log.txt").read_text()
    assert train(tiny(*settings), resume=True).iteration == 2
    more = tiny(*settings, "evaluation.min_mask_ap=0.9")
    assert train(more, resume=True).iteration == 5


def test_patience_ends_a_run_that_was_resumed_within_an_evaluation(
    tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The average of the weights is resumed too."""
    settings = (
        "solver.max_iterations=9", "solver.steps=[]", "solver.ema_decay=0.3",
        "evaluation={period: 1, patience: 2}",
    )  # fmt: skip
    whole = train(load_tiny(tiny_config, tmp_path / "whole", *settings))
    assert whole.iteration == 3  # no AP exceeds the first, which is 0
    assert largest_difference(whole.training_state["model"], whole.weights) > 0
    config = load_tiny(tiny_config, tmp_path / "cut", *settings)
    measure = Validation.measure

    def fail_after_first(*args: Any, **options: Any) -> dict[str, float]:
        if (tmp_path / "cut" / "model_0000002.pth").exists():
            raise KeyboardInterrupt
        return measure(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Validation, "measure", fail_after_first)
        with pytest.raises(KeyboardInterrupt):
            run_training(config)
    for _ in range(2):
        resumed = train(config, resume=True)
        assert resumed.iteration == 3
    assert_equal(resumed.weights, whole.weights)
    assert_equal(resumed.training_state, whole.training_state)
    assert list(_evaluations(config.output_dir)) == [1, 2, 3]


def test_another_validation_set_starts_early_stopping_anew(tiny: LoadTiny, tmp_path: Path) -> None:
    stopping = "evaluation={period: 1, patience: 1}"
    length = ("solver.max_iterations=9", "solver.steps=[]")
    first = train(tiny(stopping, *length))
    assert first.iteration == 2  # no AP exceeds the first, which is 0
    recorded = (tmp_path / "config.yaml").read_bytes()
    assert train(tiny(stopping, *length, "solver.base_lr=1"), resume=True).iteration == 2
    assert (tmp_path / "config.yaml").read_bytes() == recorded
    config = tiny(stopping, *length)
    content = json.loads(config.data.val.annotations.read_bytes())
    content["annotations"].pop()
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content))
    resumed = train(tiny(stopping, *length, f"data.val.annotations={other}"), resume=True)
    assert resumed.iteration == 3  # the checkpoint of iteration 2 is the first that is evaluated
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [own["iteration"] for own in lines if "bbox/AP" in own] == [1, 2, 3]


def test_epochs_set_the_iterations(tiny: LoadTiny, caplog: pytest.LogCaptureFixture) -> None:
    """Far more epochs than a data set needs are a warning."""
    config = tiny("solver.epochs=9")
    dataset = CocoDataset(config.data.train)
    solver = with_run_length(dataset, config).solver
    assert (solver.max_iterations, solver.steps) == (9 * 4, (27,))
    assert not caplog.records
    long = tiny("solver.max_iterations=360000")
    assert with_run_length(dataset, long).solver == long.solver
    assert "solver.max_iterations=360000 means 120000 epochs of 12" in caplog.text


def test_the_best_checkpoint_is_kept(tiny_config: Path, tmp_path: Path) -> None:
    """Also when a run was cut off between."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    settings = (
        "evaluation.skip_test=false", "evaluation.period=1", "model.roi.score_threshold=0.001",
        "model.roi.max_detections=40", "solver.steps=[]",
    )  # fmt: skip
    checkpoint = train(load_tiny(tiny_config, whole, *settings, "solver.max_iterations=3"))
    by_iteration = {i: metrics["segm/AP"] for i, metrics in _evaluations(whole).items()}
    best = max(by_iteration, key=lambda iteration: by_iteration[iteration])
    kept = load_checkpoint(whole / "model_best.pth")
    assert (kept.iteration, kept.metrics["segm/AP"]) == (best, by_iteration[best])
    for end in (1, 3):
        resumed = train(
            load_tiny(tiny_config, cut, *settings, f"solver.max_iterations={end}"), resume=end == 3
        )
    assert resumed.training_state["best_ap"] == checkpoint.training_state["best_ap"]
    assert resumed.training_state["best_ap"] == by_iteration[best]


def test_expectations_are_held_to(tiny: LoadTiny, tmp_path: Path) -> None:
    """They need an evaluation."""
    for override in ("data.val=null", "evaluation.skip_test=true"):
        config = tiny("evaluation={expected: {bbox/AP: 0.1}}", override)
        with pytest.raises(ConfigError, match=r"evaluation\.expected.*data\.val"):
            run_training(config)
    config = tiny("evaluation={expected: {bbox/AP/missing: 0.1}}")
    with pytest.raises(ConfigError, match=r"bbox/AP/missing.*no category 'missing'.*ring"):
        run_training(config)
    config = tiny("evaluation={expected: {segm/ARl: 0.1}}")
    with pytest.raises(ConfigError, match=r"segm/ARl, but .* no objects of at least 9216"):
        run_training(config)
    annotations = tmp_path / "val.json"
    content = json.loads(config.data.val.annotations.read_bytes())
    annotations.write_text(json.dumps({**content, "annotations": []}))
    for metric in ("bbox/AP", "segm/AP/ring"):
        config = tiny(
            f"evaluation={{expected: {{{metric}: 0.1}}}}", f"data.val.annotations={annotations}"
        )
        with pytest.raises(ConfigError, match=f"{metric}, but .*val.json has no objects"):
            run_training(config)
    assert not (tmp_path / "metrics.jsonl").exists()
    config = tiny("solver.max_iterations=1", "evaluation={expected: {bbox/AP: 0.9}}")
    for resume in (False, True):
        with pytest.raises(ExpectationError, match=r"bbox/AP is 0\.0000, but evaluation.expected"):
            run_training(config, resume=resume)
        assert load_checkpoint(tmp_path / "model_final.pth").metrics["bbox/AP"] == 0


@pytest.mark.parametrize("key", ["patience: 1", "min_bbox_ap: 0", "min_mask_ap: 0"])
def test_early_stopping_needs_metrics(tiny: LoadTiny, key: str) -> None:
    evaluation = f"evaluation={{per_epoch: true, {key}}}"
    for override in ("data.val=null", "evaluation.skip_eval=true"):
        with pytest.raises(ConfigError, match=r"min_bbox_ap, .*data\.val.*skip_eval.*to null"):
            run_training(tiny(evaluation, override))


def test_a_validation_set_that_does_not_fit_is_refused_at_once(
    tiny: LoadTiny, tiny_config: Path, tmp_path: Path
) -> None:
    content = json.loads((tiny_config.parent / "annotations/val.json").read_text())
    content["categories"].append({"id": 4, "name": "bar"})
    path = tmp_path / "four.json"
    path.write_text(json.dumps(content))
    config = tiny(f"data.val.annotations={path}", "evaluation.skip_test=false")
    with pytest.raises(ConfigError, match=r"category 4 .*'bar'"):
        run_training(config)
    assert not list(tmp_path.glob("*.pth"))


FROZEN = (
    "solver.freeze_backbone_after_epoch=1", "model.backbone.norm=bn", "checkpoint_period=1",
    "solver.weight_decay=0.1", "solver.steps=[]", "evaluation={period: 2}",
)  # fmt: skip


@pytest.fixture(scope="module")
def frozen(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six iterations whose backbone is frozen after the fourth."""
    folder = tmp_path_factory.mktemp("frozen")
    train(load_tiny(tiny_config, folder, *FROZEN, "solver.max_iterations=6"))
    return folder


def _moved(before: Checkpoint, after: Checkpoint) -> set[str]:
    return {n for n, w in before.weights.items() if not torch.equal(w, after.weights[n])}


def test_the_backbone_is_frozen_after_its_epoch(frozen: Path) -> None:
    third, fourth, fifth = (load_checkpoint(frozen / f"model_000000{n}.pth") for n in (3, 4, 5))
    body = {name for name in fourth.weights if name.startswith("backbone.body.")}
    assert body <= _moved(third, fourth)
    moved = _moved(fourth, load_checkpoint(frozen / "model_final.pth"))
    assert not body & moved
    assert set(fourth.weights) - body == moved
    learnt, left = (len(c.training_state["optimizer"]["state"]) for c in (fourth, fifth))
    assert 0 < left < learnt


@pytest.mark.parametrize("cut", [3, 4, 5])
def test_a_frozen_run_is_resumed_bit_for_bit(
    tiny: LoadTiny, tmp_path: Path, frozen: Path, cut: int
) -> None:
    last = f"model_{cut:07}.pth"
    shutil.copy(frozen / last, tmp_path)
    (tmp_path / "last_checkpoint").write_text(last)
    resumed = train(tiny(*FROZEN, "solver.max_iterations=6"), resume=True)
    whole = load_checkpoint(frozen / "model_final.pth")
    assert_equal(resumed.weights, whole.weights)
    assert_equal(resumed.training_state, whole.training_state)
