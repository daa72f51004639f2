"""Command line of `maskrcnn weights convert`."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import run_main
from foreign_states import State, maskrcnn_benchmark, random_state

from maskrcnn_trt.model.checkpoint import load_checkpoint
from maskrcnn_trt.model.config.schema import ModelConfig

Call = Callable[..., tuple[object, str, str]]


@pytest.fixture
def convert(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Call:
    """Return a function that converts to `converted.pth`: exit code, stdout and stderr."""

    def call(*arguments: str | Path) -> tuple[object, str, str]:
        words = ["weights", "convert", *map(str, arguments), "-o", str(tmp_path / "converted.pth")]
        return run_main(monkeypatch, capsys, *words)

    return call


@pytest.fixture(scope="module")
def state() -> State:
    config = ModelConfig.model_validate(
        {"num_classes": 3, "backbone": {"fpn_channels": 32}, "roi": {"box_head_dim": 32}}
    )
    return maskrcnn_benchmark(random_state(config))


def test_convert_writes_a_checkpoint_and_prints_a_report(
    state: State, convert: Call, tmp_path: Path
) -> None:
    anchors = {"module.rpn.anchor_generator.cell_anchors.0": torch.ones(3, 4)}
    torch.save({"model": state | anchors}, tmp_path / "model.pth")
    code, out, err = convert(tmp_path / "model.pth", "backbone.stride_in_1x1=false")
    assert (code or 0, err) == (0, "")
    for line in (
        "maskrcnn-benchmark: resnet50 fpn, frozen_bn",
        f"{len(state)} tensors, all that the model has",
        "rpn.anchor_generator.cell_anchors.0",
        "inclusive_boxes=true",
        "backbone.stride_in_1x1=false",
        "pixel_mean=[122.7717, 115.9465, 102.9801]",
    ):
        assert line in out
    checkpoint = load_checkpoint(tmp_path / "converted.pth")
    assert not checkpoint.model_config.backbone.stride_in_1x1
    names = [category.name for category in checkpoint.categories]
    assert names == ["class 1", "class 2", "class 3"]
    mean = pytest.approx([122.77, 115.95, 102.98], 1e-3)
    assert checkpoint.build_model().pixel_mean.tolist() == mean


def test_other_channel_order_keeps_the_channels(
    state: State, convert: Call, tmp_path: Path
) -> None:
    torch.save(state, tmp_path / "model.pth")
    assert convert(tmp_path / "model.pth", "--other-channel-order")[0] in (0, None)
    stem = load_checkpoint(tmp_path / "converted.pth").weights["backbone.body.conv1.weight"]
    assert torch.equal(stem, state["module.backbone.body.stem.conv1.weight"])


def test_unconvertible_files_are_rejected_with_a_remedy(
    state: State, convert: Call, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    path = tmp_path / "backbone.pth"
    torch.save({n: t for n, t in state.items() if "backbone.body" in n}, path)
    for file, fact in {
        tmp_path / "none.pth": "does not exist",
        tiny_checkpoint: "already a checkpoint of this program",
        path: "maskrcnn train CONFIG weights=FILE",
    }.items():
        code, _, err = convert(file)
        assert code == 1
        assert err.startswith(f"Error: {file}")
        assert fact in err
        assert err.count("\n") == 1
        assert not (tmp_path / "converted.pth").exists()


@pytest.mark.parametrize("name", ["model.pth", "folder/../model.pth", "link.pth", "classes.json"])
def test_inputs_are_not_overwritten(
    state: State,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    path, categories = tmp_path / "model.pth", tmp_path / "classes.json"
    torch.save(state, path)
    categories.write_text("{}")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.pth").symlink_to(path)
    words = ("weights", "convert", path, "--categories", categories, "-o", tmp_path / name)
    code, _, err = run_main(monkeypatch, capsys, *map(str, words))
    assert code == 2
    assert str(tmp_path / name) in err
    assert torch.load(path, weights_only=True).keys() == state.keys()
    assert categories.read_text() == "{}"
