import os
from pathlib import Path
from typing import Any

import pytest
from tiny_run import LoadTiny

from maskrcnn_trt.plugins.nms_keep.kernel import MAX_BOXES
from maskrcnn_trt.training.config import ConfigError, load_config
from maskrcnn_trt.training.config_sources import presets
from maskrcnn_trt.training.schedule import learning_rate
from maskrcnn_trt.training.solver_config import SolverConfig


def test_overrides_reach_every_depth(tiny: LoadTiny, tmp_path: Path) -> None:
    config = tiny(
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
    assert config.weights == "a=b.pth"


REFUSED = {
    "solver.base_rate=1": "unknown key solver.base_rate (did you mean solver.base_lr?); allowed "
    "here: optimizer, images_per_batch",
    "base_lr=1": "unknown key base_lr (did you mean solver.base_lr?); allowed here: output_dir",
    "nms_iou=1": "unknown key nms_iou (did you mean model.rpn.nms_iou or model.roi.nms_iou?)",
    "frobnicate=1": "unknown key frobnicate; allowed here: output_dir, seed, device, processes",
    "data.val.image=x": "unknown key data.val.image (did you mean data.val.images?); allowed here: "
    "images, annotations",
    "model.rpn.nms=1": "unknown key model.rpn.nms (did you mean model.rpn.nms_iou?); allowed here: "
    "sampling, pre_nms_top_n_train",
    "solver.base_lr=fast": "solver.base_lr is 'fast'; allowed: number, > 0",
    "solver.base_lr=.inf": "solver.base_lr is inf; allowed: number, > 0",
    "solver.base_lr=-1": "solver.base_lr is -1; allowed: number, > 0",
    "solver.max_iterations=1.5": "solver.max_iterations is 1.5; allowed: whole number, >= 1",
    "solver.max_iterations=yes": "solver.max_iterations is True; allowed: whole number, >= 1",
    "solver.max_iterations=10000000000000000000": "allowed: whole number, >= 1, <= 1000000000",
    "solver.steps=[yes]": "solver.steps is [True]; allowed: list of whole numbers >= 1",
    "solver.steps=[4, 2]": "solver: steps [4, 2] are not in strictly ascending order",
    "solver.steps=4": "solver.steps is 4; allowed: list of whole numbers",
    "solver.steps=[1, x]": "solver.steps.1 is 'x'; allowed for solver.steps: list of whole numbers",
    "solver.steps=[0, 2]": "solver.steps.0 is 0; allowed for solver.steps: list of whole numbers "
    ">= 1",
    "solver.accumulate=3": "solver: images_per_batch 4 is not divisible by accumulate 3",
    "solver.scale_from_batch=0": "allowed: whole number, >= 1, <= 65536, or null",
    f"solver.images_per_batch={10**32}": "allowed: whole number, >= 1, <= 65536",
    "solver.epochs=0": "solver.epochs is 0; allowed: whole number, >= 1, <= 1000000, or null",
    "solver.schedule=poly": "allowed: steps | cosine | linear",
    "solver.ema_decay=1": "solver.ema_decay is 1; allowed: number, > 0, < 1, or null",
    "evaluation={patience: 2}": "patience need evaluations during training",
    "solver=4": "solver is 4; it is a section with the keys optimizer, images_per_batch",
    "model.rpn.sampling=[1]": "model.rpn.sampling is [1]; it is a section with the keys foreground",
    "evaluation.expected={bbox/AP: .nan}": "evaluation.expected",
    "evaluation.tolerance=.inf": "evaluation.tolerance",
    "evaluation.expected={bbox/AP: 37.7}": "metrics are in 0..1",
    "evaluation.expected={bbox/AP: high}": "allowed for evaluation.expected: numbers by name",
    "precision=int8": "precision is 'int8'; allowed: fp32 | tf32 | fp16 | bf16",
    "device=tpu": "device: 'tpu' is neither auto, cpu, cuda nor GPU numbers such as 0,1",
    "device=0,0": "device: 0,0 names a GPU twice",
    "weights=[1]": "weights is [1]; allowed: text, or null",
    "model.backbone.name=vgg16": "allowed: resnet10 | resnet18 | resnet50 | resnet101",
    "model.backbone.fpn_channels=48": "allowed: whole number, >= 32, <= 65536, multiple of 32",
    "model.backbone.frozen_stages=6": "allowed: whole number, >= 0, <= 5",
    f"model.rpn.pre_nms_top_n_train={MAX_BOXES + 1}": "model.rpn.pre_nms_top_n_train is 16385; "
    "allowed: whole number, >= 1, <= 16384",
    f"model.rpn.pre_nms_top_n_test={MAX_BOXES + 1}": "allowed: whole number, >= 1, <= 16384",
    "model.anchors.sizes=[8, 16, 32, 64, 0]": "model.anchors.sizes.4 is 0; allowed for "
    "model.anchors.sizes: list of numbers > 0, not empty",
    "model.anchors.aspect_ratios=[-1]": "list of numbers > 0, not empty",
    "model.pixel_std=[0, 1, 1]": "list of 3 numbers > 0",
    "model.roi.box_head_dim=1000000": "allowed: whole number, >= 1, <= 65536",
    "model.roi.box_pool=5000": "allowed: whole number, >= 1, <= 128",
    "model.rpn.conv_depth=1000": "allowed: whole number, >= 1, <= 64",
    f"model.roi.mask_crop_size={10**18}": "allowed: whole number, >= 14, <= 4096, or null",
    f"model.roi.max_detections={2**63}": "allowed: whole number, >= 1, <= 1048576",
    "data.workers=100000": "allowed: whole number, >= 0, <= 512",
    "data.buckets=[[32000000, 32000000]]": "has more than 64000000 pixels",
    "model.pixel_mean=[.nan, 1, 1]": "model.pixel_mean.0 is nan; allowed",
    "model.pixel_mean=[1]": "model.pixel_mean.1 is missing; allowed for model.pixel_mean: list",
    "data.max_size=32": "data: max_size 32 is below min_size 64",
    "data.buckets=[[64, 100]]": "are not multiples of 32",
    "data.buckets=[[64, 96]]": "data: no bucket holds an image of 96x64 pixels",
    "data.max_size=100": "as in data.buckets=[[64,128],[128,64]]",
    "data.buckets=[[64]]": "data.buckets.0.1 is missing; allowed for data.buckets: list of [",
    "data.transforms=4": "data.transforms is 4; allowed: list of mappings",
    "data.transforms=[{size: 4}]": "{'size': 4} is not a transform; write one as in {name:",
    "data.transforms=[{name: ScaleJitter}, {name: ColorJiter}]": "names: ScaleJitter, RandomShort",
    "data.transforms=[{name: ColorJitter, hue: 2}]": "data.transforms.0: ColorJitter: hue is 2; "
    "allowed: number, >= 0, <= 0.5",
    "data.transforms=[{name: ColorJitter, bright: 1}]": "unknown key bright (did you mean "
    "brightness?); allowed here: name, p, brightness",
    "data.transforms=[{name: ColorJitter, brightness: 1e300}]": "brightness is '1e300'; allowed",
    "data.transforms=[{name: RandomCrop}]": "RandomCrop: size is missing; allowed: list of 2 whole "
    "numbers",
    "data.transforms=[{name: ScaleJitter, scale_range: [2, 1]}]": "[2.0, 1.0] is not two ascending",
    "data.transforms=[{name: ColorJitter}, {name: ScaleJitter}]": "ScaleJitter must be the first",
    "data.transforms=[{name: SimpleCopyPaste}, {name: ColorJitter}]": "must be the last",
    "data={decode: device, transforms: [{name: ColorJitter}], min_size: 64, max_size: 96, "
    "train: {images: a, annotations: b}}": "data: transforms need decode=workers",
    "data.transforms=[{name: ScaleJitter, scale_range: [1, 1e300]}]": "scale_range.1 is '1e300'; "
    "allowed for scale_range: list of 2 numbers > 0 <= 10",
    "data.extra_train=[{images: a, annotations: b, weight: 1e30}]": "weight is '1e30'; allowed",
    "data.extra_train=[{images: a}]": "data.extra_train.0.annotations is missing; allowed for",
    "data.extra_train=[{images: a, annotations: b, wait: 2}]": "(did you mean "
    "data.extra_train?); allowed for data.extra_train: list of mappings",
    "data.train.images=null": "data.train.images is None; allowed: path",
    "output_dir=010": "output_dir is 8, which YAML does not read as text; put the text in quotes",
    "output_dir=2024-01-01": "put the text in quotes, as in 'KEY=\"TEXT\"'",
    "data.train={images: x}": "data.train.annotations is missing; allowed: path",
    "seed=20000000000000000000": "allowed: whole number, >= 0, < 9223372036854775808",
    "seed": "override 'seed' is not of the form key.path=value",
    "=1": "override '=1' is not of the form key.path=value",
    "seed=[1": "the value of override 'seed=[1' is not YAML",
    "device.name=cpu": "device.name cannot be set, because device is a value, not a section",
    "solver.base_lr.max=1": "solver.base_lr.max cannot be set, because solver.base_lr is a value",
}


@pytest.mark.parametrize("override", REFUSED)
def test_errors_name_key_and_allowed_values(tiny: LoadTiny, override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny(override)
    message = str(caught.value)
    assert REFUSED[override] in message
    assert "\n" not in message


@pytest.mark.parametrize("overrides", [None, 5, b"seed=1", "seed=1", [5], [b"seed=1"], {"seed": 1}])
def test_overrides_must_be_strings(overrides: Any) -> None:
    with pytest.raises(ConfigError, match="string"):
        load_config("quick", overrides)


@pytest.mark.parametrize("source", [None, ["quick"], 5])
def test_source_must_be_a_name_or_path(source: Any) -> None:
    with pytest.raises(ConfigError, match="give the name of a preset"):
        load_config(source)


def test_overrides_may_be_an_iterator() -> None:
    with pytest.raises(ConfigError, match=r"solver\.max_iterations=5 has no effect"):
        load_config("quick", iter(["solver.epochs=2", "solver.max_iterations=5"]))


FILES = {
    "": "run.yaml is empty; it must be a mapping of keys",
    "\xff\xd8\xff\xe0": "run.yaml is not YAML",
    "- 1": "is a list; it must be a mapping of keys",
    "a: [1": "is not YAML",
    "seed: 1\nseed: 2": "is not YAML: the key seed occurs twice",
    "data: {min_size: 800, min_size: 640}": "is not YAML: the key min_size occurs twice",
    "seed: 2026-13-45": "is not YAML: invalid timestamp",
    "a: " + 999 * "[": "is not YAML: the document is nested too deeply",
    "seed: &itself [*itself]": "seed is [[...]]; allowed: whole number",
    "a: b: c": "is not YAML",
    "{}": "data is missing; it is a section with the keys train, val",
    "data: {train: {images: a}}": "data.train.annotations is missing; allowed: path",
    "model:\ndata:": "model is None; it is a section with the keys num_classes",
    "data: {train: {images: a, annotations: b}}": "the key `weights` is missing, but "
    "the backbone has frozen stages or frozen batch norm; set weights=FILE, or train the whole "
    "backbone with model.backbone.frozen_stages=0 and model.backbone.norm=gn; to freeze random "
    "weights, set weights=null",
    "base: [1]": "base is [1], not the name of a preset or path of a file",
    "base: run.yaml": "these bases form a cycle",
    "base: quikc": "neither a file nor a preset (did you mean quick?); presets: 1x",
    "base: other.yaml": "other.yaml' is neither a file nor a preset; presets: 1x",
}


@pytest.mark.parametrize("text", FILES)
def test_errors_name_the_file_and_its_fault(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text, "latin-1")
    with pytest.raises(ConfigError) as caught:
        load_config(str(path))
    message = str(caught.value)
    assert str(tmp_path) in message
    assert FILES[text] in message
    assert "\n" not in message


def test_the_folder_of_a_run_is_answered_with_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"is a folder.*; give .* run in it, .*config\.yaml"):
        load_config(str(tmp_path))


@pytest.mark.timeout(60)
def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe' is neither a file nor a preset"):
        load_config(tmp_path / "pipe")


def test_a_base_is_overlaid_section_by_section(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "mine.yaml").write_text(
        "base: models/wide.yaml\nseed: 3\nsolver: {steps: [7]}\ndata: {val: null}\n"
    )
    (tmp_path / "models" / "wide.yaml").write_text(
        "base: ../group_norm.yaml\nmodel: {roi: {box_head_dim: 64}}\nsolver: {base_lr: 0.5}\n"
    )
    (tmp_path / "group_norm.yaml").write_text(
        "base: bs32\nseed: 1\nmodel: {roi: {box_pool: 9}}\ndata: {workers: 0}\n"
    )
    config = load_config(str(tmp_path / "mine.yaml"), ["solver.gamma=0.2"])
    preset = load_config("bs32")
    changes = {"steps": (7,), "base_lr": 0.5, "gamma": 0.2}
    assert config.solver == preset.solver.model_copy(update=changes)
    assert config.data == preset.data.model_copy(update={"val": None, "workers": 0})
    assert (config.model.roi.box_head_dim, config.model.roi.box_pool) == (64, 9)
    assert config.model.roi.mask_crop_size == preset.model.roi.mask_crop_size
    assert (config.seed, config.output_dir) == (3, preset.output_dir)


def test_a_file_replaces_settings_of_its_base(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "base: 1x\nsolver: {epochs: 7}\nevaluation: {expected: {bbox/AP: 0.3}}\n"
    )
    path = tmp_path / "mine.yaml"
    for text, iterations, epochs, expected in (
        ("solver: {max_iterations: 5, steps: []}\nevaluation: {expected: {}}", 5, None, {}),
        ("solver: {max_iterations: 5, epochs: 3}", 5, 3, {"bbox/AP": 0.3}),
        ("evaluation: {expected: {segm/AP: 0.2}}", 90000, 7, {"bbox/AP": 0.3, "segm/AP": 0.2}),
    ):
        path.write_text(f"base: base.yaml\n{text}")
        config = load_config(str(path))
        assert (config.solver.max_iterations, config.solver.epochs) == (iterations, epochs)
        assert config.evaluation.expected == expected


def test_a_circle_of_bases_is_named(tmp_path: Path) -> None:
    for name, base in (("a", "b"), ("b", "c"), ("c", "b")):
        (tmp_path / f"{name}.yaml").write_text(f"base: {base}.yaml")
    with pytest.raises(ConfigError, match=r"a.yaml has base .*b.yaml has base .*c.yaml has base"):
        load_config(str(tmp_path / "a.yaml"))


def test_frozen_stages_need_an_explicit_choice_of_weights(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {train: {images: a, annotations: b}}")
    for overrides in (
        ["weights=backbone.pth"],
        ["weights=null"],
        ["model.backbone={frozen_stages: 0, norm: gn}"],
    ):
        load_config(str(path), overrides)
    for norm, stages in (("gn", 1), ("frozen_bn", 0)):
        with pytest.raises(ConfigError, match="`weights` is missing"):
            load_config(str(path), [f"model.backbone={{frozen_stages: {stages}, norm: {norm}}}"])


# Values in the configuration files of the reference implementations.
SCHEDULES = {
    "1x": (16, 0.02, 90000, (60000, 80000)),
    "1x-1gpu": (4, 0.005, 360000, (240000, 320000)),
    "bs32": (32, 0.04, 50000, (33000, 44000)),
    "bs64": (64, 0.08, 27500, (18000, 24000)),
    "bs96": (96, 0.12, 16667, (12000, 16000)),
    "gn-scratch": (16, 0.02, 270000, (210000, 250000)),
    "tf2": (32, 0.04, 44352, (29571, 36964)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_presets_have_the_reference_schedules(name: str) -> None:
    solver = load_config(name).solver
    found = (solver.images_per_batch, solver.base_lr, solver.max_iterations, solver.steps)
    assert found == SCHEDULES[name]


@pytest.mark.parametrize("name", presets())
def test_overrides_of_a_presets_schedule_are_not_scaled(name: str) -> None:
    overrides = ["solver.max_iterations=100", "solver.steps=[50]", "solver.base_lr=0.125"]
    solver = load_config(name, overrides).solver
    assert (solver.max_iterations, solver.steps, solver.base_lr) == (100, (50,), 0.125)


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [("1x", 0.02 / 3, 0.02), ("bs64", 0, 0.08), ("bs96", 0.04, 0.12), ("tf2", 0, 0.04)],
)
def test_presets_have_the_reference_warm_up(name: str, first: float, last: float) -> None:
    solver = load_config(name).solver
    assert learning_rate(solver, 0) == pytest.approx(first)
    assert learning_rate(solver, solver.warmup_iterations) == last
    if name in ("bs64", "bs96"):  # the warm-up adds 1e-4 per iteration
        assert learning_rate(solver, 101) - learning_rate(solver, 100) == pytest.approx(1e-4)


def solver_of(batch: int, **changes: Any) -> SolverConfig:
    schedule = {"base_lr": 0.02, "max_iterations": 90001, "steps": (60000, 80000)}
    return SolverConfig(images_per_batch=batch, **{**schedule, **changes})


@pytest.mark.parametrize("batch", [1, 2, 12, 16, 17, 256, 4096])
def test_scaling_keeps_the_epochs(batch: int) -> None:
    assert solver_of(batch, scale_from_batch=batch).scaled() == solver_of(batch)
    plain, scaled = solver_of(16), solver_of(batch, scale_from_batch=16).scaled()
    pairs = [
        (plain.max_iterations, scaled.max_iterations),
        (plain.warmup_iterations, scaled.warmup_iterations),
        *zip(plain.steps, scaled.steps, strict=True),
    ]
    for written, found in pairs:
        assert abs(written * 16 - found * batch) <= batch / 2
    assert scaled.base_lr / batch == pytest.approx(plain.base_lr / 16)
    assert scaled.scaled() == scaled


def test_training_sees_the_scaled_schedule(tiny: LoadTiny) -> None:
    config = tiny("solver.scale_from_batch=1")
    assert (config.solver.base_lr, config.solver.max_iterations) == (0.04, 1)
    with pytest.raises(
        ConfigError, match=r"steps \[1, 2\] become \[0, 0\] when scaled from 1 to 4"
    ):
        tiny("solver.scale_from_batch=1", "solver.steps=[1, 2]")
    with pytest.raises(ConfigError, match=r"steps \[1, 8\] become \[0, 2\]"):
        tiny("solver.scale_from_batch=1", "solver.steps=[1, 8]")


def test_epochs_keep_the_shape_of_the_schedule(tiny: LoadTiny) -> None:
    solver = SolverConfig(max_iterations=900, steps=(600, 800), warmup_iterations=50, epochs=3)
    short, long = solver.with_epoch_length(6), solver.with_epoch_length(1000)
    assert (short.max_iterations, short.steps, short.warmup_iterations) == (18, (12, 16), 1)
    assert (long.max_iterations, long.steps, long.warmup_iterations) == (3000, (2000, 2667), 50)
    assert short.model_copy(update={"epochs": 3}).with_epoch_length(6) == short
    assert tiny("solver.epochs=null", "solver.max_iterations=7").solver.max_iterations == 7
    with pytest.raises(ConfigError, match=r"solver\.max_iterations=7 .*solver\.epochs=null"):
        tiny("solver.epochs=2", "solver.max_iterations=7")
