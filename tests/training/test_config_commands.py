"""What the command line says about configurations."""

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from maskrcnn_trt.cli import cli
from maskrcnn_trt.model.config_reference import sections
from maskrcnn_trt.training.config import TrainConfig, load_config
from maskrcnn_trt.training.config_sources import presets


def run(*args: str) -> str:
    result = CliRunner().invoke(cli, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def leaves(values: dict[str, Any]) -> list[str]:
    """Names of all values that are not sections, wherever they are."""
    names = []
    for name, value in values.items():
        names += leaves(value) if isinstance(value, dict) and value else [name]
    return names


def unwrapped(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("name", presets())
def test_effective_yaml_loads_to_the_same(name: str, tmp_path: Path) -> None:
    path = tmp_path / "effective.yaml"
    overrides = ("solver.scale_from_batch=8", "data.val=null", "output_dir=runs/a b")
    path.write_text(run("config", "show", name, *overrides, "--yaml"))
    loaded, config = load_config(str(path)), load_config(name, overrides)
    assert loaded == config
    # The number of classes stays open if it was.
    assert loaded.model.model_fields_set - {"num_classes"} >= set(config.model.model_fields_set)
    assert "num_classes" not in loaded.model.model_fields_set


def test_every_key_is_shown_with_its_value(tmp_path: Path) -> None:
    text = run("config", "show", "1x-1gpu", "solver.gamma=0.25")
    for name in leaves(load_config("1x-1gpu").model_dump()):
        assert f"  {name} = " in text
    words = unwrapped(text)
    assert "gamma = 0.25 What the learning rate is multiplied by at each of" in words
    assert "[number, > 0, <= 1; default 0.1]" in words
    assert "max_iterations = 360000 Optimiser steps. [whole number, >= 1; default 90000]" in words
    assert "momentum = 0.9 Of SGD; AdamW's first beta. [number, >= 0, < 1; the default]" in words
    assert "images = data/coco2017/val2017 Folder of the images. [path; must be given]" in words
    order = [text.index(f"\n{name}: ") for name in ("model", "model.roi", "data", "solver")]
    assert order == sorted(order)
    assert "data.val = null: Data set that evaluations use" in run(
        "config", "show", "1x", "data.val="
    )


def test_every_preset_is_listed_with_a_sentence() -> None:
    text = run("config", "list")
    assert re.findall(r"^\S+", text, re.MULTILINE) == list(presets())
    assert "1x-1gpu 1x on a single GPU: 4 images a step, all else by the" in unwrapped(text)
    assert "bs64 1x with 64 images a step. bs96" in unwrapped(text)


def section_models(model: type[BaseModel]) -> list[type[BaseModel]]:
    found = [model]
    for field in model.model_fields.values():
        kinds = (field.annotation, *getattr(field.annotation, "__args__", ()))
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found += section_models(kind)
    return found


def test_help_of_training_explains_every_key() -> None:
    text = run("train", "--help")
    assert max(map(len, text.splitlines())) <= 100
    words = unwrapped(text)
    for model in section_models(TrainConfig):
        for name, field in model.model_fields.items():
            assert f"\n  {name} " in text or f".{name}: " in text or f"\n{name}: " in text
            assert unwrapped(field.description or "").replace("- ", "-") in words.replace("- ", "-")
    assert "In a file, the key `base` names a preset, or another file relative to it" in words
    assert "base_lr Learning rate after warm-up. [number, > 0; default 0.02]" in words


def test_every_section_and_key_has_a_meaning() -> None:
    for section in sections(TrainConfig):
        assert section.meaning
        assert [key.name for key in section.keys if not key.meaning] == []


def test_reference_presets_train_on_coco() -> None:
    for name in presets():
        if not name.startswith("quick"):
            data = load_config(name).data
            assert data.train.images == Path("data/coco2017/train2017")
            assert data.val is not None
            assert data.val.annotations.name == "instances_val2017.json"
