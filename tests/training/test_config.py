from pathlib import Path

import pytest
from tiny_run import load_tiny

from maskrcnn_trt.training.config import ConfigError, load_config, presets


@pytest.mark.parametrize("name", presets())
def test_presets_are_valid(name: str) -> None:
    config = load_config(name)
    assert config.solver.max_iterations > 0
    assert load_config(name, ["seed=5"]) == config.model_copy(update={"seed": 5})


def test_overrides_reach_every_depth(tiny_config: Path, tmp_path: Path) -> None:
    config = load_tiny(
        tiny_config,
        tmp_path,
        "seed=4",
        "solver.base_lr=1e-3",
        "solver.steps=[1, 2]",
        "model.backbone.name=resnet50",
        "model.rpn.sampling={foreground_iou: 0.6, background_iou: 0.2, batch_size_per_image: 8, "
        "positive_fraction: 1}",
        "data.val=null",
        "evaluation.period=3",
        "weights=a=b.pth",
    )
    assert config.output_dir == tmp_path
    assert (config.seed, config.solver.base_lr, config.solver.steps) == (4, 0.001, (1, 2))
    assert config.model.backbone.name == "resnet50"
    assert config.model.backbone.fpn_channels == 32
    assert config.model.rpn.sampling.foreground_iou == 0.6
    assert config.data.val is None
    assert config.evaluation.period == 3
    assert config.weights == Path("a=b.pth")


REFUSED = {
    "solver.base_rate=1": "unknown key solver.base_rate; allowed here: optimizer, images_per_batch",
    "iterations=1": "unknown key iterations; allowed here: output_dir, seed, device, precision",
    "data.val.image=x": "unknown key data.val.image; allowed here: images, annotations",
    "model.rpn.nms=1": "unknown key model.rpn.nms; allowed here: sampling, pre_nms_top_n_train",
    "solver.base_lr=fast": "solver.base_lr is 'fast'; input should be a valid number",
    "solver.base_lr=-1": "solver.base_lr is -1; input should be greater than 0",
    "solver.max_iterations=1.5": "solver.max_iterations is 1.5; input should be a valid integer",
    "solver.steps=[4, 2]": "solver: steps [4, 2] must rise",
    "solver.accumulate=3": "solver: images_per_batch 4 does not divide by accumulate 3",
    "solver=4": "solver is 4; input should be",
    "precision=int8": "precision is 'int8'; input should be 'fp32', 'tf32', 'fp16' or 'bf16'",
    "device=tpu": "device is 'tpu'; input should be 'auto', 'cpu' or 'cuda'",
    "model.backbone.name=vgg16": "input should be 'resnet18', 'resnet50' or 'resnet101'",
    "model.backbone.fpn_channels=48": "input should be a multiple of 32",
    "model.backbone.frozen_stages=6": "input should be less than or equal to 5",
    "data.max_size=32": "data: max_size 32 is below min_size 64",
    "data.buckets=[[64, 100]]": "is not a multiple of 32 on both sides",
    "data.buckets=[[64, 96]]": "data: no bucket holds an image of 96x64 pixels",
    "data.train.images=null": "data.train.images is None; input is not a valid path",
    "data.train={images: x}": "data.train.annotations is missing and has no default",
    "seed": "override 'seed' is not of the form key.path=value",
    "=1": "override '=1' is not of the form key.path=value",
    "seed=[1": "the value of override 'seed=[1' is not YAML",
    "device.name=cpu": "device.name: device is a value, not a section",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_is_not_allowed_is_named(tiny_config: Path, tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tiny(tiny_config, tmp_path, override)
    sentence = str(caught.value)
    assert REFUSED[override] in sentence
    assert "\n" not in sentence


FILES = {
    "": "must hold keys and values, not NoneType",
    "- 1": "must hold keys and values, not list",
    "a: [1": "is not YAML",
    "a: b: c": "is not YAML",
    "{}": "data is missing and has no default",
    "data: {train: {images: a}}": "data.train.annotations is missing and has no default",
    "model:\ndata:": "model is None; input should be",
}


@pytest.mark.parametrize("text", FILES)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(str(path))
    sentence = str(caught.value)
    assert sentence.startswith(str(path))
    assert FILES[text] in sentence
    assert "\n" not in sentence


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "picture.yaml"
    path.write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(ConfigError, match=r"picture\.yaml is not YAML"):
        load_config(str(path))


@pytest.mark.parametrize("source", ["quik", "missing.yaml", "."])
def test_unknown_sources_are_told_the_presets(source: str) -> None:
    with pytest.raises(ConfigError, match=r"neither a file nor a preset; presets: .*quick"):
        load_config(source)
