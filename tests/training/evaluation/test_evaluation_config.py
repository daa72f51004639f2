"""Values of `maskrcnn eval` from the checkpoint, the configuration and the command line."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_run import measure

from maskrcnn_trt.model.bundle.manifest import Category
from maskrcnn_trt.model.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from maskrcnn_trt.model.config.schema import ModelConfig
from maskrcnn_trt.training.config import ConfigError
from maskrcnn_trt.training.evaluation.config import load_evaluation_config

SIZES = ("data.min_size=96", "data.max_size=160", "data.buckets=[[96, 160], [160, 96]]")


@pytest.fixture
def checkpoint(tiny_checkpoint: Path) -> Checkpoint:
    return load_checkpoint(tiny_checkpoint)


@pytest.mark.parametrize("source", ["1x", "c4", "quick"])
def test_the_model_is_that_of_the_checkpoint(source: str, checkpoint: Checkpoint) -> None:
    """The model of the preset is ignored."""
    converted = replace(
        checkpoint, model_config=ModelConfig(inclusive_boxes=True, mask_paste="detectron2")
    )
    overrides = ("model.roi.aligned=false", "model.roi.max_detections=7")
    config = load_evaluation_config(source, overrides, converted)
    assert config.model.roi.max_detections == 7
    unchanged = config.model.roi.model_copy(update={"max_detections": 100})
    assert config.model.model_copy(update={"roi": unchanged}) == converted.model_config


def test_frozen_stages_need_no_weights(tmp_path: Path, checkpoint: Checkpoint) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {train: {images: a, annotations: b}}")
    assert load_evaluation_config(str(path), (), checkpoint).model == checkpoint.model_config


def test_another_model_is_refused(tiny_config: Path, checkpoint: Checkpoint) -> None:
    for override, pattern in {
        "model.roi.box_head_dim=32": "box_head_dim=32 .* 64; .*model.mask_paste, model.rpn.",
        "model.roi.aligned=true": "aligned=true .* false; .*model.mask_paste",
        "model.roi.agnostic=true": "unknown key model.roi.agnostic .*; allowed here: sampling",
    }.items():
        with pytest.raises(ConfigError, match=pattern):
            load_evaluation_config(str(tiny_config), [override], checkpoint)


def test_overrides_of_inference_keys_apply(
    tiny_config: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    def scores(*overrides: str) -> list[float]:
        measure(tiny_checkpoint, tiny_config, tmp_path, "evaluation.skip_eval=true", *overrides)
        found = json.loads((tmp_path / "inference" / "bbox.json").read_text())
        return sorted(detection["score"] for detection in found)

    everything = scores()
    middle = everything[len(everything) // 2]
    assert scores(f"model.roi.score_threshold={middle}") == [s for s in everything if s > middle]
    assert len(scores("model.roi.max_detections=1")) == 5


def test_other_input_sizes_are_logged(
    tiny_config: Path, tiny_checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "maskrcnn_trt"):
        measure(tiny_checkpoint, tiny_config, tmp_path, *SIZES)
        assert not caplog.messages
        measure(tiny_checkpoint, tiny_config, tmp_path, *SIZES[:2], "data.buckets=[[160, 160]]")
    (message,) = caplog.messages
    assert message.endswith("'data.buckets=[[96, 160], [160, 96]]'")


def test_evaluation_needs_a_validation_set_with_classes_of_the_model(
    tiny_config: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"set data\.val\.images"):
        measure(tiny_checkpoint, tiny_config, tmp_path, "data.val=null")
    content = json.loads((tiny_config.parent / "annotations" / "val.json").read_text())
    content["categories"].append({"id": 4, "name": "bar"})
    path = tmp_path / "four.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"category 4 .*'bar'"):
        measure(tiny_checkpoint, tiny_config, tmp_path, f"data.val.annotations={path}")


def test_classes_without_annotations_do_not_count(
    tiny_config: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Weights of torchvision, for example, have classes for the ids that COCO does not use."""
    more = tmp_path / "more.pth"
    checkpoint = load_checkpoint(tiny_checkpoint)
    first, _, third = checkpoint.categories
    categories = (first, third, Category(id=9, name="moon"))
    save_checkpoint(more, replace(checkpoint, categories=categories))
    content = json.loads((tiny_config.parent / "annotations" / "val.json").read_text())
    content["categories"] = [{"id": c.id, "name": c.name} for c in (first, third)]
    ids = {first.id, third.id}
    content["annotations"] = [a for a in content["annotations"] if a["category_id"] in ids]
    path = tmp_path / "two.json"
    path.write_text(json.dumps(content))
    metrics = measure(more, tiny_config, tmp_path, f"data.val.annotations={path}")
    assert {n for n in metrics if n.startswith("bbox/AP/")} == {"bbox/AP/circle", "bbox/AP/star"}
    found = json.loads((tmp_path / "inference" / "bbox.json").read_text())
    assert {detection["category_id"] for detection in found} <= {first.id, third.id, 9}
