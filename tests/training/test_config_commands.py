"""The command `maskrcnn config`, and the keys in the help of `maskrcnn train`."""

import re
from pathlib import Path
from typing import Any, get_origin

import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from maskrcnn_trt.cli import cli
from maskrcnn_trt.model.config.reference import sections
from maskrcnn_trt.training.config import TrainConfig, load_config
from maskrcnn_trt.training.config_sources import presets


def run(*args: str) -> str:
    result = CliRunner().invoke(cli, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def leaves(values: dict[str, Any]) -> list[str]:
    """Return the names of all values, at any depth."""
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
    assert config.solver.max_iterations > 0
    assert loaded == config
    # The number of classes is not set unless it was.
    assert loaded.model.model_fields_set - {"num_classes"} >= set(config.model.model_fields_set)
    assert "num_classes" not in loaded.model.model_fields_set


def test_every_key_is_shown_with_its_value(tmp_path: Path) -> None:
    text = run("config", "show", "1x-1gpu", "solver.gamma=0.25")
    for name in leaves(load_config("1x-1gpu").model_dump()):
        assert f"  {name} = " in text
    words = unwrapped(text)
    for key, allowed in {
        "gamma = 0.25": "number, > 0, <= 1; default 0.1",
        "max_iterations = 360000": "whole number, >= 1, <= 1000000000; default 90000",
        "momentum = 0.9": "number, >= 0, < 1; the default",
        "images = data/coco2017/val2017": "path; required",
    }.items():
        assert re.search(rf"{key} [A-Z][^\[]+\. \[{allowed}\]", words)
    order = [text.index(f"\n{name}: ") for name in ("model", "model.roi", "data", "solver")]
    assert order == sorted(order)
    assert "\ndata.val = null: " in run("config", "show", "1x", "data.val=")


def test_every_preset_is_listed_with_a_sentence() -> None:
    text = run("config", "list")
    assert re.findall(r"^\S+", text, re.MULTILINE) == list(presets())
    assert "1x-1gpu R-50-FPN on a single GPU, with 4 images per step." in unwrapped(text)
    assert "bs64 R-50-FPN with 64 images per step. bs96" in unwrapped(text)


def section_models(model: type[BaseModel]) -> list[type[BaseModel]]:
    found = [model]
    for field in model.model_fields.values():
        if get_origin(field.annotation) is tuple:  # the description explains the keys of its items
            continue
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
    assert "the key `base`" in words
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
